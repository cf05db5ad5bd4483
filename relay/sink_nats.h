/*-------------------------------------------------------------------------
 *
 * sink_nats.h
 *		Sink: NATS JetStream.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_NATS_H
#define IDEM_RELAY_SINK_NATS_H

#include "sink.h"

extern const RelaySinkType relay_sink_nats;

#endif							/* IDEM_RELAY_SINK_NATS_H */
