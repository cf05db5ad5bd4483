/*-------------------------------------------------------------------------
 *
 * text.h
 *		Texts that grow.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_TEXT_H
#define RELAY_TEXT_H

#include <stddef.h>

typedef struct Text
{
	char	   *data;			/* with a zero behind it */
	size_t		len;
	size_t		size;
} Text;

extern Text *text_new(void);
extern void text_free(Text *text);
extern void text_clear(Text *text);
extern void text_add(Text *text, const char *part);
extern void text_add_bytes(Text *text, const char *part, size_t length);
extern void text_add_char(Text *text, char c);
extern void text_addf(Text *text, const char *format,...)
			__attribute__((format(printf, 2, 3)));
extern void text_add_element(Text *array, const char *element);
extern void text_mend(char *text, bool only_ascii);

#endif							/* RELAY_TEXT_H */
