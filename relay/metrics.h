/*-------------------------------------------------------------------------
 *
 * metrics.h
 *		What the relay counts, over HTTP.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_METRICS_H
#define RELAY_METRICS_H

#include "config.h"

extern void metrics_configure(Config *config);
extern void metrics_begin(Config *config);
extern void metrics_end(void);

#endif							/* RELAY_METRICS_H */
