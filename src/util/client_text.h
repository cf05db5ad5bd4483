/*-------------------------------------------------------------------------
 *
 * client_text.h
 *		Can a client be sent a value?
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CLIENT_TEXT_H
#define IDEMPOTENCY_CLIENT_TEXT_H

/*
 * A call returns no more bytes of text of the documents of messages or claims,
 * unless it returns a single row, so that its client gets them before it gives
 * up, or its memory does.  No attempt would count then, and each next call would
 * return the same.
 */
#define IDEM_MAX_RESULT_SIZE	(16 * 1024 * 1024)

/* The server cannot send much more in a row. */
#define IDEM_MAX_TEXT_SIZE		(256 * 1024 * 1024)

extern int64 idem_json_text_limit(Size size, int64 maximum);
extern int64 idem_json_text_size(Datum json, int64 limit);
extern Datum idem_check_client_json(Datum json);
extern Datum idem_check_client_text(Datum value);

#endif							/* IDEMPOTENCY_CLIENT_TEXT_H */
