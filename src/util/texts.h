/*-------------------------------------------------------------------------
 *
 * texts.h
 *		Comparing and clipping texts, as bytes.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_TEXTS_H
#define IDEMPOTENCY_TEXTS_H

extern bool idem_text_equal(Datum a, Datum b);
extern int	idem_text_compare(Datum a, Datum b);
extern Datum idem_clip_text(Datum value);

#endif							/* IDEMPOTENCY_TEXTS_H */
