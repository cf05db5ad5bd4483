/*-------------------------------------------------------------------------
 *
 * sink_outbox.h
 *		Sink: other topics of the same outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_OUTBOX_H
#define IDEM_RELAY_SINK_OUTBOX_H

#include "routing.h"

extern const RelaySinkType relay_sink_outbox;

extern void relay_sink_outbox_check(const RelayRouting *routing,
									RelayConfig *config);

#endif							/* IDEM_RELAY_SINK_OUTBOX_H */
