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

/* Standard output ends with a part of a line. */
extern bool relay_stdout_is_cut;

#endif							/* IDEM_RELAY_SINK_STDOUT_H */
