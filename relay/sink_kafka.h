/*-------------------------------------------------------------------------
 *
 * sink_kafka.h
 *		Sink: Kafka.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_KAFKA_H
#define IDEM_RELAY_SINK_KAFKA_H

#include "sink.h"

extern const RelaySinkType relay_sink_kafka;

#endif							/* IDEM_RELAY_SINK_KAFKA_H */
