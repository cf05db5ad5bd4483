/*-------------------------------------------------------------------------
 *
 * taker.h
 *		Taking messages from the outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_TAKER_H
#define RELAY_TAKER_H

#include "config.h"

/* Since the start. */
extern uint64_t taker_taken;

extern void taker_begin(const Section *settings);
extern void taker_end(void);
extern void taker_work(int64_t now);
extern bool taker_stop(int64_t now);
extern uint64_t taker_connections_lost(void);

#endif							/* RELAY_TAKER_H */
