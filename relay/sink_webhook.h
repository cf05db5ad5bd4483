/*-------------------------------------------------------------------------
 *
 * sink_webhook.h
 *		Sink: Webhooks.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_WEBHOOK_H
#define IDEM_RELAY_SINK_WEBHOOK_H

#include "sink.h"

extern const RelaySinkType relay_sink_webhook;

#endif							/* IDEM_RELAY_SINK_WEBHOOK_H */
