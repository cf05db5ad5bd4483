/*-------------------------------------------------------------------------
 *
 * connect.h
 *		Connect sinks without blocking the event loop.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_CONNECT_H
#define IDEM_RELAY_CONNECT_H

#include "sink.h"

extern void relay_connect(RelaySink *sink);

#endif							/* IDEM_RELAY_CONNECT_H */
