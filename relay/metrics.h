/*-------------------------------------------------------------------------
 *
 * metrics.h
 *		The relay's metrics.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_METRICS_H
#define IDEM_RELAY_METRICS_H

#include "taker.h"
#include "text.h"

extern bool relay_metrics_health(const RelayTaker *taker, RelayText *to);
extern void relay_metrics_write(const RelayTaker *taker, RelayText *to);

#endif							/* IDEM_RELAY_METRICS_H */
