/*-------------------------------------------------------------------------
 *
 * idempotency.c
 *		Module entry point, and what every primitive needs.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_type_d.h"
#include "common/cryptohash.h"
#include "common/sha2.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "portability/instr_time.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "compat.h"
#include "idempotency.h"
#include "settings.h"
#include "worker.h"

PG_MODULE_MAGIC;

bool		idem_preloaded = false;

static TimestampTz add_interval(TimestampTz time, const Interval *interval);

void		_PG_init(void);

static void check_row_type(TypeCacheEntry *entry, IdemResultType *type);

/*
 * Called when the library is loaded, in a backend or in the postmaster.
 */
void
_PG_init(void)
{
	idem_define_settings();
	idem_preloaded = process_shared_preload_libraries_in_progress;
	if (idem_preloaded && !IsBinaryUpgrade)
		idem_register_launcher();
}

/*
 * Argument "n", which must not be NULL.  Raises 22004, calling it "name".
 */
Datum
idem_required_arg(FunctionCallInfo fcinfo, int n, const char *name)
{
	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("argument \"%s\" must not be null", name)));
	return PG_GETARG_DATUM(n);
}

/*
 * Argument "n", a text that passes idem_check_name().  Raises 22004, too.
 */
Datum
idem_name_arg(FunctionCallInfo fcinfo, int n, const char *name)
{
	return idem_check_name(idem_required_arg(fcinfo, n, name), name);
}

/*
 * A text of 1 to IDEM_MAX_NAME_LENGTH bytes, detoasted.  Raises 22023 for any
 * other, calling it "name".
 */
Datum
idem_check_name(Datum value, const char *name)
{
	text	   *detoasted = DatumGetTextPP(value);
	int			length = VARSIZE_ANY_EXHDR(detoasted);

	if (length < 1 || length > IDEM_MAX_NAME_LENGTH)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must have 1 to %d bytes",
						name, IDEM_MAX_NAME_LENGTH),
				 errdetail("It has %d.", length)));
	return PointerGetDatum(detoasted);
}

/*
 * Argument "n", an interval, or NULL.  Raises 22023, calling it "name", for
 * one that is infinite, negative as intervals compare, with months of 30 days,
 * or that leads back from now: "-1 mon 30 days" does where that month had 31.
 */
Interval *
idem_interval_arg(FunctionCallInfo fcinfo, int n, const char *name)
{
	static const Interval zero = {0};
	Interval   *interval;
	TimestampTz now;

	if (PG_ARGISNULL(n))
		return NULL;

	interval = PG_GETARG_INTERVAL_P(n);
	if (INTERVAL_NOT_FINITE(interval))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be finite", name)));
	if (interval->month >= 0 && interval->day >= 0 && interval->time >= 0)
		return interval;

	now = GetCurrentTimestamp();
	if (DatumGetBool(DirectFunctionCall2(interval_lt,
										 IntervalPGetDatum(interval),
										 IntervalPGetDatum(&zero))) ||
		add_interval(now, interval) < now)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must not be negative", name)));
	return interval;
}

/*
 * The elements of a text array, each of which passes idem_check_name().
 * Returns their number.  Raises 22004, too, for a NULL among them.
 */
int
idem_text_array(Datum array, const char *name, Datum **elements)
{
	bool	   *nulls;
	int			count;

	deconstruct_array(DatumGetArrayTypeP(array), TEXTOID, -1, false,
					  TYPALIGN_INT, elements, &nulls, &count);
	for (int i = 0; i < count; i++)
	{
		CHECK_FOR_INTERRUPTS();
		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("argument \"%s\" must not contain nulls", name)));
		(*elements)[i] = idem_check_name((*elements)[i], name);
	}
	return count;
}

/*
 * Are two texts the same bytes?
 */
bool
idem_text_equal(Datum a, Datum b)
{
	return DatumGetBool(DirectFunctionCall2Coll(texteq, C_COLLATION_OID,
												a, b));
}

/*
 * The order of two texts' bytes: negative, 0 or positive, as memcmp().
 */
int
idem_text_compare(Datum a, Datum b)
{
	text	   *ta = DatumGetTextPP(a);
	text	   *tb = DatumGetTextPP(b);
	int			la = VARSIZE_ANY_EXHDR(ta);
	int			lb = VARSIZE_ANY_EXHDR(tb);
	int			order = memcmp(VARDATA_ANY(ta), VARDATA_ANY(tb), Min(la, lb));

	return order != 0 ? order : la - lb;
}

/*
 * A text, cut to idempotency.max_response_size: a report of an error must not
 * fail because the error was long.
 */
Datum
idem_clip_text(Datum value)
{
	text	   *whole = DatumGetTextPP(value);
	int			length = VARSIZE_ANY_EXHDR(whole);

	if (length <= idem_max_response_size)
		return PointerGetDatum(whole);
	length = pg_mbcliplen(VARDATA_ANY(whole), length, idem_max_response_size);
	return PointerGetDatum(cstring_to_text_with_len(VARDATA_ANY(whole),
													length));
}

/*
 * Microseconds on a clock that nobody can set, and that all processes of the
 * server share.  It is for how long something takes, or may take.
 */
int64
idem_monotonic_time(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

/*
 * The SHA-256 of some bytes, PG_SHA256_DIGEST_LENGTH of them.
 */
void
idem_sha256(const char *data, size_t length, uint8 *digest)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA256);

	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) data, length) < 0 ||
		pg_cryptohash_final(ctx, digest, PG_SHA256_DIGEST_LENGTH) < 0)
		elog(ERROR, "could not compute %s hash: %s", "SHA256",
			 pg_cryptohash_error(ctx));
	pg_cryptohash_free(ctx);
}

/*
 * A time plus a setting's milliseconds.
 */
TimestampTz
idem_add_ms(TimestampTz time, double ms)
{
	return time + (TimestampTz) (ms * 1000);
}

/*
 * A time plus an interval, or plus a setting where the interval is NULL.
 * Raises 22008 for a sum that is no timestamp, 22023 for one that is earlier.
 */
TimestampTz
idem_add_interval(TimestampTz time, const Interval *interval,
				  double default_ms)
{
	TimestampTz sum;

	if (interval == NULL)
		return idem_add_ms(time, default_ms);
	sum = add_interval(time, interval);
	if (sum < time)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("interval must not be negative"),
				 errdetail("From %s, it leads back to %s.",
						   pstrdup(timestamptz_to_str(time)),
						   timestamptz_to_str(sum))));
	return sum;
}

static TimestampTz
add_interval(TimestampTz time, const Interval *interval)
{
	return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												   TimestampTzGetDatum(time),
												   IntervalPGetDatum(interval)));
}

/*
 * The row that a function returns.  "type" is a static variable of the
 * function.  Raises 55000 if somebody has altered its row type.
 */
Datum
idem_result(FunctionCallInfo fcinfo, IdemResultType *type,
			Datum *values, bool *nulls)
{
	TupleDesc	desc = idem_result_desc(fcinfo, type);

	return HeapTupleGetDatum(heap_form_tuple(desc, values, nulls));
}

/*
 * What such a row consists of, for as long as the row type is not altered.
 */
TupleDesc
idem_result_desc(FunctionCallInfo fcinfo, IdemResultType *type)
{
	Oid			row_type = get_fn_expr_rettype(fcinfo->flinfo);
	TypeCacheEntry *entry;

	if (!OidIsValid(row_type))
		row_type = get_func_rettype(fcinfo->flinfo->fn_oid);
	entry = lookup_type_cache(row_type, TYPECACHE_TUPDESC);
	if (unlikely(entry->tupDesc_identifier != type->checked ||
				 entry->tupDesc == NULL))
		check_row_type(entry, type);
	return entry->tupDesc;
}

/*
 * Raise an error unless a row type has the columns that the function fills.
 */
static void
check_row_type(TypeCacheEntry *entry, IdemResultType *type)
{
	TupleDesc	desc = entry->tupDesc;
	bool		same = desc != NULL && desc->natts == type->ncolumns;

	for (int i = 0; same && i < desc->natts; i++)
		same = TupleDescAttr(desc, i)->atttypid == type->columns[i];
	if (!same)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("type \"%s\" has been altered",
						format_type_be(entry->type_id)),
				 errhint("Give it its own columns again, or install the extension anew.")));
	type->checked = entry->tupDesc_identifier;
}
