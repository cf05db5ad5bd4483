/*-------------------------------------------------------------------------
 *
 * idempotency.h
 *		What every primitive needs: checked arguments, times, results.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_H
#define IDEMPOTENCY_H

#include "datatype/timestamp.h"
#include "fmgr.h"
#include "funcapi.h"

/* Names that become part of an index key have at most this many bytes. */
#define IDEM_MAX_NAME_LENGTH	255

/* A function returns at most this many columns. */
#define IDEM_MAX_RESULT_COLUMNS	14

/*
 * The row that a function returns: its columns' types, and the last form of
 * its row type that was seen to have them.
 */
typedef struct IdemResultType
{
	int			ncolumns;
	Oid			columns[IDEM_MAX_RESULT_COLUMNS];
	uint64		checked;
} IdemResultType;

/* Was the library loaded by the postmaster, so that there are workers? */
extern bool idem_preloaded;

extern Datum idem_name_arg(FunctionCallInfo fcinfo, int n, const char *name);
extern Datum idem_check_name(Datum value, const char *name);
extern Datum idem_required_arg(FunctionCallInfo fcinfo, int n,
							   const char *name);
extern Interval *idem_interval_arg(FunctionCallInfo fcinfo, int n,
								   const char *name);
extern int	idem_text_array(Datum array, const char *name, Datum **elements);
extern bool idem_text_equal(Datum a, Datum b);
extern int	idem_text_compare(Datum a, Datum b);
extern Datum idem_clip_text(Datum value);
extern void idem_sha256(const char *data, size_t length, uint8 *digest);

extern int64 idem_monotonic_time(void);
extern TimestampTz idem_add_ms(TimestampTz time, double ms);
extern TimestampTz idem_add_interval(TimestampTz time,
									 const Interval *interval,
									 double default_ms);
extern Datum idem_result(FunctionCallInfo fcinfo, IdemResultType *type,
						 Datum *values, bool *nulls);
extern TupleDesc idem_result_desc(FunctionCallInfo fcinfo,
								  IdemResultType *type);

#endif							/* IDEMPOTENCY_H */
