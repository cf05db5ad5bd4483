/*-------------------------------------------------------------------------
 *
 * sink_stdout.h
 *		Sink: Standard output.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_STDOUT_H
#define IDEM_RELAY_SINK_STDOUT_H

#include "sink.h"

extern const RelaySinkType relay_sink_stdout;

#endif							/* IDEM_RELAY_SINK_STDOUT_H */
