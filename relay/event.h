/*-------------------------------------------------------------------------
 *
 * event.h
 *		What a message looks like to who consumes it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_EVENT_H
#define RELAY_EVENT_H


#include "message.h"
#include "text.h"

extern void event_body(const Message *message, Text *body);
extern void event_line(const Message *message, Text *line);
extern const char *event_content_type(const Message *message);

#endif							/* RELAY_EVENT_H */
