/*-------------------------------------------------------------------------
 *
 * signature.h
 *		Signatures of webhooks.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_SIGNATURE_H
#define RELAY_SIGNATURE_H

#include <stddef.h>

/* Of a signature as text, with its end. */
#define SIGNATURE_SIZE	64

extern int	signature_read_secret(const char *text, unsigned char *secret,
								  int size);
extern void signature_make(const unsigned char *secret, int length,
						   const char *const *parts, int nparts,
						   char *signature);

#endif							/* RELAY_SIGNATURE_H */
