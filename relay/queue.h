/*-------------------------------------------------------------------------
 *
 * queue.h
 *		The messages that the relay holds.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_QUEUE_H
#define RELAY_QUEUE_H

#include "message.h"

/* Answers that the server is to be given. */
extern MessageList queue_delivered;
extern MessageList queue_refused;
extern MessageList queue_untried;

extern int	queue_count(void);
extern size_t queue_size(void);
extern Message *queue_first(void);

extern void queue_add(Message *message);
extern void queue_fly(Message *message);
extern void queue_deliver(Message *message);
extern void queue_refuse(Message *message, int64_t retry_after,
						 const char *reason);
extern void queue_give_back(Message *message);
extern void queue_lost(Message *message);
extern void queue_drop(Message *message);
extern void queue_give_back_ready(struct Sink *sink);

#endif							/* RELAY_QUEUE_H */
