/*-------------------------------------------------------------------------
 *
 * dispatch.h
 *		Hand ready messages to their sinks.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_DISPATCH_H
#define IDEM_RELAY_DISPATCH_H

#include "answers.h"
#include "routing.h"

extern void relay_dispatch_work(const RelayRouting *routing,
								const RelayAnswers *answers, bool stopping,
								int64_t now);
extern bool relay_dispatch_in_flight(const RelayRouting *routing);
extern bool relay_dispatch_connecting(const RelayRouting *routing);
extern void relay_dispatch_abandon(const RelayRouting *routing);
extern void relay_dispatch_resume(const RelayRouting *routing);

#endif							/* IDEM_RELAY_DISPATCH_H */
