/*-------------------------------------------------------------------------
 *
 * sink_outbox.h
 *		Sink: other topics of the same outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_OUTBOX_H
#define IDEM_RELAY_SINK_OUTBOX_H

#include "sink.h"

extern const RelaySinkType relay_sink_outbox;

#endif							/* IDEM_RELAY_SINK_OUTBOX_H */
