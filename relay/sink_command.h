/*-------------------------------------------------------------------------
 *
 * sink_command.h
 *		Sink: A command for each message.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_COMMAND_H
#define IDEM_RELAY_SINK_COMMAND_H

#include "sink.h"

extern const RelaySinkType relay_sink_command;

#endif							/* IDEM_RELAY_SINK_COMMAND_H */
