/*-------------------------------------------------------------------------
 *
 * sinks.h
 *		The sinks of the configuration.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINKS_H
#define IDEM_RELAY_SINKS_H

#include "routing.h"

typedef void (*RelaySinksCallback) (const char *title,
									const RelaySettingDef *defs);

extern void relay_sinks_configure(RelayRouting *routing, RelayConfig *config,
								  RelayLoop *loop, RelayQueue *queue,
								  struct RelayServer *server);
extern void relay_sinks_describe(RelaySinksCallback describe);
extern bool relay_sinks_connect(const RelayRouting *routing);
extern void relay_sinks_free(RelayRouting *routing);

#endif							/* IDEM_RELAY_SINKS_H */
