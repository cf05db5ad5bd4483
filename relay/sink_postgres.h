/*-------------------------------------------------------------------------
 *
 * sink_postgres.h
 *		Sink: a function in another PostgreSQL database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_POSTGRES_H
#define IDEM_RELAY_SINK_POSTGRES_H

#include "sink.h"

extern const RelaySinkType relay_sink_postgres;

#endif							/* IDEM_RELAY_SINK_POSTGRES_H */
