/*-------------------------------------------------------------------------
 *
 * texts.c
 *		Comparing and clipping texts, as bytes.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_collation_d.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"

#include "util/compat.h"
#include "util/settings.h"
#include "util/texts.h"

/*
 * Do two texts consist of the same bytes?
 */
bool
idem_text_equal(Datum a, Datum b)
{
	return DatumGetBool(DirectFunctionCall2Coll(texteq, C_COLLATION_OID,
												a, b));
}

/*
 * Compare the bytes of two texts.  Negative, 0 or positive, as memcmp().
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
 * Return a text, cut to idempotency.max_response_size: an error report must
 * not fail because the error is long.
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
