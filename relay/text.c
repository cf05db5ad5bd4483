/*-------------------------------------------------------------------------
 *
 * text.c
 *		Texts that grow.
 *
 *-------------------------------------------------------------------------
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "relay.h"
#include "text.h"

#define FIRST_SIZE	256

static size_t character_length(const unsigned char *at);
static void make_room(Text *text, size_t length);

/*
 * An empty text.
 */
Text *
text_new(void)
{
	Text	   *text = relay_alloc(sizeof(Text));

	text	  ->size = FIRST_SIZE;
	text	  ->data = relay_alloc(FIRST_SIZE);
	return text;
}

void
text_free(Text *text)
{
	if (text)
	{
		free(text->data);
		free(text);
	}
}

/*
 * Make it an empty one; the memory is kept.
 */
void
text_clear(Text *text)
{
	text	  ->len = 0;
	text	  ->data[0] = '\0';
}

void
text_add(Text *text, const char *part)
{
	text_add_bytes(text, part, strlen(part));
}

void
text_add_bytes(Text *text, const char *part, size_t length)
{
	make_room(text, length);
	memcpy(text->data + text->len, part, length);
	text	  ->len += length;
	text	  ->data[text->len] = '\0';
}

void
text_add_char(Text *text, char c)
{
	text_add_bytes(text, &c, 1);
}

/*
 * Add what printf() would write.
 */
void
text_addf(Text *text, const char *format,...)
{
	va_list		args;
	int			length;

	va_start(args, format);
	length = vsnprintf(NULL, 0, format, args);
	va_end(args);
	make_room(text, (size_t) length);
	va_start(args, format);
	vsnprintf(text->data + text->len, (size_t) length + 1, format, args);
	va_end(args);
	text	  ->len += (size_t) length;
}

/*
 * Add an element to the text of an array of PostgreSQL, without its end.
 */
void
text_add_element(Text *array, const char *element)
{
	text_add(array, array->len ? ",\"" : "{\"");
	for (; *element; element++)
	{
		if (*element == '"' || *element == '\\')
			text_add_char(array, '\\');
		text_add_char(array, *element);
	}
	text_add_char(array, '"');
}

/*
 * Put a question mark for each byte that is no part of a character in UTF-8,
 * or of none in ASCII, since a server takes nothing else.
 */
void
text_mend(char *text, bool only_ascii)
{
	unsigned char *at = (unsigned char *) text;

	while (*at)
	{
		size_t		length = only_ascii ? *at < 0x80 : character_length(at);

		if (length == 0)
			*at = '?';
		at += length ? length : 1;
	}
}

/*
 * How many bytes the character has that begins there; 0 if none does.
 */
static size_t
character_length(const unsigned char *at)
{
	size_t		length = *at < 0x80 ? 1 : *at < 0xc2 ? 0 : *at < 0xe0 ? 2 :
		*at < 0xf0 ? 3 : *at < 0xf5 ? 4 : 0;
	size_t		i;

	for (i = 1; i < length; i++)
	{
		if ((at[i] & 0xc0) != 0x80)
			return 0;
	}
	/* Longer than it had to be, half of a pair, or beyond the last plane. */
	if ((*at == 0xe0 && at[1] < 0xa0) || (*at == 0xed && at[1] > 0x9f) ||
		(*at == 0xf0 && at[1] < 0x90) || (*at == 0xf4 && at[1] > 0x8f))
		return 0;
	return length;
}

static void
make_room(Text *text, size_t length)
{
	while (text->size - text->len <= length)
	{
		text	  ->size *= 2;
		text	  ->data = relay_resize(text->data, text->size);
	}
}
