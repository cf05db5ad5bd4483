/*-------------------------------------------------------------------------
 *
 * text.h
 *		Strings that grow.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_TEXT_H
#define IDEM_RELAY_TEXT_H

#include <stdbool.h>
#include <stddef.h>

typedef struct RelayText
{
	char	   *data;			/* always followed by a zero byte */
	size_t		len;
	size_t		size;			/* of the allocation */
} RelayText;

extern RelayText *relay_text_new(void);
extern void relay_text_free(RelayText *to);
extern void relay_text_clear(RelayText *to);
extern void relay_text_add(RelayText *to, const char *part);
extern void relay_text_add_bytes(RelayText *to, const char *part,
								 size_t length);
extern void relay_text_add_char(RelayText *to, char c);
extern void relay_text_addf(RelayText *to, const char *format,...)
			__attribute__((format(printf, 2, 3)));
extern void relay_text_add_element(RelayText *array, const char *element);
extern void relay_text_sanitize(char *string, bool only_ascii);

#endif							/* IDEM_RELAY_TEXT_H */
