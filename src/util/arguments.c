/*-------------------------------------------------------------------------
 *
 * arguments.c
 *		Arguments of SQL functions, checked.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type_d.h"
#include "miscadmin.h"
#include "utils/array.h"

#include "util/arguments.h"
#include "util/compat.h"
#include "util/texts.h"

static int	compare_texts(const void *a, const void *b, void *arg);

/*
 * Return argument "n".  Raises 22004 if it is NULL; "name" is its name in the
 * message, here and below.
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
 * Return argument "n", a text that passes idem_check_name().  Also raises
 * 22004.
 */
Datum
idem_name_arg(FunctionCallInfo fcinfo, int n, const char *name)
{
	return idem_check_name(idem_required_arg(fcinfo, n, name), name);
}

/*
 * Return a text of 1 to IDEM_MAX_NAME_LENGTH bytes, detoasted.  Raises 22023
 * for any other.
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
 * Return the elements of a text array, each of which passes
 * idem_check_name(), and their number.  Also raises 22004 for a NULL among
 * them.
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
 * The same, with each text once, in the order of their bytes.
 */
int
idem_distinct_texts(Datum array, const char *name, Datum **elements)
{
	int			count = idem_text_array(array, name, elements);
	Datum	   *texts = *elements;
	int			n = 0;

	qsort_interruptible(texts, count, sizeof(Datum), compare_texts, NULL);
	for (int i = 0; i < count; i++)
	{
		if (n == 0 || !idem_text_equal(texts[n - 1], texts[i]))
			texts[n++] = texts[i];
	}
	return n;
}

static int
compare_texts(const void *a, const void *b, void *arg)
{
	return idem_text_compare(*(const Datum *) a, *(const Datum *) b);
}
