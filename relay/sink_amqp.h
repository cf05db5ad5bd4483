/*-------------------------------------------------------------------------
 *
 * sink_amqp.h
 *		Sink: RabbitMQ, or another AMQP 0-9-1 broker.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_AMQP_H
#define IDEM_RELAY_SINK_AMQP_H

#include "sink.h"

extern const RelaySinkType relay_sink_amqp;

#endif							/* IDEM_RELAY_SINK_AMQP_H */
