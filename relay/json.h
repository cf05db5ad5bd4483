/*-------------------------------------------------------------------------
 *
 * json.h
 *		As much of JSON as a relay needs.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_JSON_H
#define RELAY_JSON_H

#include <stdbool.h>

#include "text.h"

extern void json_string(Text *to, const char *text);
extern bool json_member(const char **at, Text *name, Text *value);

#endif							/* RELAY_JSON_H */
