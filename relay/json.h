/*-------------------------------------------------------------------------
 *
 * json.h
 *		Write and read the members of a JSON object.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_JSON_H
#define IDEM_RELAY_JSON_H

#include "text.h"

extern void relay_json_add_member(RelayText *to, char before,
								  const char *name, const char *string);
extern bool relay_json_read_member(const char **at, RelayText *name,
								   RelayText *value);

#endif							/* IDEM_RELAY_JSON_H */
