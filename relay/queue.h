/*-------------------------------------------------------------------------
 *
 * queue.h
 *		The messages that the relay holds.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_QUEUE_H
#define IDEM_RELAY_QUEUE_H

#include "message.h"

#define RELAY_QUEUE_BUCKETS 4096	/* a power of two */

/* Callers read the fields, and write only to the lists of answers. */
typedef struct RelayQueue
{
	/* All messages, from the oldest, linked by held_prev and held_next. */
	RelayMessage *first;
	RelayMessage *last;
	int			count;
	size_t		size;			/* in bytes */

	/* The limits of these two, about; taker.c keeps them. */
	int			max_count;
	size_t		max_size;

	/* Answers that the server has not confirmed, and is not receiving. */
	RelayMessageList delivered;
	RelayMessageList refused;
	RelayMessageList untried;

	/* The first message of each key, linked by bucket_next. */
	RelayMessage *buckets[RELAY_QUEUE_BUCKETS];
} RelayQueue;

extern void relay_queue_add(RelayQueue *queue, RelayMessage *message);
extern void relay_queue_hand_over(RelayMessage *message, int64_t now);
extern void relay_queue_return(RelayMessage *message);
extern void relay_queue_retry(RelayQueue *queue, RelayMessage *message);
extern void relay_queue_deliver(RelayQueue *queue, RelayMessage *message);
extern void relay_queue_refuse(RelayQueue *queue, RelayMessage *message,
							   int64_t retry_after, bool counted,
							   const char *reason);
extern void relay_queue_release(RelayQueue *queue, RelayMessage *message);
extern void relay_queue_lose(RelayQueue *queue, RelayMessage *message);
extern bool relay_queue_has_expired(const RelayQueue *queue, int64_t now);
extern void relay_queue_drop(RelayQueue *queue, RelayMessage *message);

#endif							/* IDEM_RELAY_QUEUE_H */
