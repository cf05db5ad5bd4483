/*-------------------------------------------------------------------------
 *
 * routing.h
 *		The sink of each topic, and the topics to take.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_ROUTING_H
#define IDEM_RELAY_ROUTING_H

#include "sink.h"

/* Made and released by sinks.c. */
typedef struct RelayRouting
{
	RelaySink  *first;			/* in the order of the configuration */
	char	  **topics;			/* to take; NULL: all */
	bool		shared;			/* several sinks have topics */
} RelayRouting;

extern void relay_routing_check(const RelayRouting *routing,
								RelayConfig *config, const RelaySink *sink);
extern void relay_routing_configure(RelayRouting *routing,
									RelayConfig *config);
extern RelaySink *relay_routing_sink(const RelayRouting *routing,
									 const char *topic);
extern bool relay_routing_takes(const RelayRouting *routing,
								const char *topic);
extern bool relay_routing_held(const RelayRouting *routing);
extern bool relay_routing_full(const RelayRouting *routing);
extern bool relay_routing_recovers(const RelayRouting *routing);
extern char *relay_routing_topics(const RelayRouting *routing);

#endif							/* IDEM_RELAY_ROUTING_H */
