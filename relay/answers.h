/*-------------------------------------------------------------------------
 *
 * answers.h
 *		What the server is told of messages that the relay holds.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_ANSWERS_H
#define RELAY_ANSWERS_H

#include <stdbool.h>
#include <stdint.h>

#include "message.h"

/* Since the start. */
extern uint64_t answers_acked;
extern uint64_t answers_nacked;
extern uint64_t answers_given_back;
extern uint64_t answers_lost;

extern void answers_begin(int64_t lease);
extern void answers_end(void);
extern void answers_work(int64_t now);
extern bool answers_connected(void);
extern bool answers_may_start(const Message *message, int64_t now);
extern void answers_cancel(int pid);
extern uint64_t answers_connections_lost(void);

#endif							/* RELAY_ANSWERS_H */
