/*-------------------------------------------------------------------------
 *
 * event.h
 *		The form in which consumers receive a message.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_EVENT_H
#define IDEM_RELAY_EVENT_H

#include "message.h"
#include "text.h"

extern void relay_event_body(const RelayMessage *message, RelayText *to);
extern void relay_event_line(const RelayMessage *message, RelayText *to);
extern const char *relay_event_content_type(const RelayMessage *message);
extern bool relay_event_refuse_header(RelayMessage *message,
									  const char *const *reserved);

#endif							/* IDEM_RELAY_EVENT_H */
