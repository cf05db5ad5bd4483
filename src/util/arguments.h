/*-------------------------------------------------------------------------
 *
 * arguments.h
 *		Arguments of SQL functions, checked.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_ARGUMENTS_H
#define IDEMPOTENCY_ARGUMENTS_H

#include "fmgr.h"

/* The maximum length of names that become part of an index key, in bytes. */
#define IDEM_MAX_NAME_LENGTH	512

extern Datum idem_required_arg(FunctionCallInfo fcinfo, int n,
							   const char *name);
extern Datum idem_name_arg(FunctionCallInfo fcinfo, int n, const char *name);
extern Datum idem_check_name(Datum value, const char *name);
extern int	idem_text_array(Datum array, const char *name, Datum **elements);
extern int	idem_distinct_texts(Datum array, const char *name,
								Datum **elements);

#endif							/* IDEMPOTENCY_ARGUMENTS_H */
