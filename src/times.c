/*-------------------------------------------------------------------------
 *
 * times.c
 *		Intervals that lead onwards, and a clock that nobody can set.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "portability/instr_time.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "times.h"

static TimestampTz add_interval(TimestampTz time, const Interval *interval);

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
