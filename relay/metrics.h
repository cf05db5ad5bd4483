/*-------------------------------------------------------------------------
 *
 * metrics.h
 *		The relay's metrics.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_METRICS_H
#define IDEM_RELAY_METRICS_H

#include "completer.h"
#include "taker.h"
#include "text.h"

extern bool relay_metrics_health(const RelayTaker *taker,
								 const RelayCompleter *completers,
								 RelayText *to);
extern void relay_metrics_write(const RelayTaker *taker,
								const RelayCompleter *completers,
								RelayText *to);

#endif							/* IDEM_RELAY_METRICS_H */
