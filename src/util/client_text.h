/*-------------------------------------------------------------------------
 *
 * client_text.h
 *		Checking that a value can be sent to a client.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CLIENT_TEXT_H
#define IDEMPOTENCY_CLIENT_TEXT_H

/*
 * The maximum size of a result with more than one message or claim, in bytes
 * of their documents as text.  The client must be able to receive the result
 * within its time and memory limits.  Otherwise no attempt would count, and
 * each later call would return the same rows.
 */
#define IDEM_MAX_RESULT_SIZE	(16 * 1024 * 1024)

/*
 * The maximum size of one document as text.  The server cannot send much more
 * in a row.
 */
#define IDEM_MAX_TEXT_SIZE		(256 * 1024 * 1024)

extern int64 idem_json_text_limit(Size size, int64 maximum);
extern int64 idem_json_text_size(Datum json, int64 limit);
extern Datum idem_check_client_json(Datum json);
extern Datum idem_check_client_text(Datum value);

#endif							/* IDEMPOTENCY_CLIENT_TEXT_H */
