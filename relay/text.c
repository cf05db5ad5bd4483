/*-------------------------------------------------------------------------
 *
 * text.c
 *		Strings that grow.
 *
 * The caller owns each RelayText.  This file owns no other state.  All files
 * that compose queries, bodies or answers call it.
 *
 *-------------------------------------------------------------------------
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "text.h"

#define FIRST_SIZE	256

static void reserve(RelayText *to, size_t length);
static size_t character_length(const unsigned char *at);

/*
 * Return an empty text, which the caller releases with relay_text_free().
 */
RelayText *
relay_text_new(void)
{
	RelayText  *to = relay_alloc(sizeof(RelayText));

	to->size = FIRST_SIZE;
	to->data = relay_alloc(FIRST_SIZE);
	return to;
}

/*
 * Release a text, which can be NULL.
 */
void
relay_text_free(RelayText *to)
{
	if (to)
	{
		free(to->data);
		free(to);
	}
}

/*
 * Make a text empty, but keep its memory.
 */
void
relay_text_clear(RelayText *to)
{
	to->len = 0;
	to->data[0] = '\0';
}

/*
 * Append a string.
 */
void
relay_text_add(RelayText *to, const char *part)
{
	relay_text_add_bytes(to, part, strlen(part));
}

/*
 * Append bytes, which must not lie in the text itself.
 */
void
relay_text_add_bytes(RelayText *to, const char *part, size_t length)
{
	reserve(to, length);
	memcpy(to->data + to->len, part, length);
	to->len += length;
	to->data[to->len] = '\0';
}

/*
 * Append one byte.
 */
void
relay_text_add_char(RelayText *to, char c)
{
	relay_text_add_bytes(to, &c, 1);
}

/*
 * Append what printf() would write.
 */
void
relay_text_addf(RelayText *to, const char *format,...)
{
	va_list		args;
	int			length;

	va_start(args, format);
	length = vsnprintf(NULL, 0, format, args);
	va_end(args);
	reserve(to, (size_t) length);
	va_start(args, format);
	vsnprintf(to->data + to->len, (size_t) length + 1, format, args);
	va_end(args);
	to->len += (size_t) length;
}

/*
 * Append an element to the text of a PostgreSQL array.  The first element
 * opens the array.  The caller closes it with '}'.
 */
void
relay_text_add_element(RelayText *array, const char *element)
{
	relay_text_add(array, array->len ? ",\"" : "{\"");
	for (; *element; element++)
	{
		if (*element == '"' || *element == '\\')
			relay_text_add_char(array, '\\');
		relay_text_add_char(array, *element);
	}
	relay_text_add_char(array, '"');
}

/*
 * Replace each byte that the server would reject with a question mark: bytes
 * that are not part of a UTF-8 character or, on request, not ASCII.
 */
void
relay_text_sanitize(char *string, bool only_ascii)
{
	unsigned char *at = (unsigned char *) string;

	while (*at)
	{
		size_t		length = only_ascii ? *at < 0x80 : character_length(at);

		if (length == 0)
			*at = '?';
		at += length ? length : 1;
	}
}

/*
 * Make room for "length" more bytes and the final zero byte.
 */
static void
reserve(RelayText *to, size_t length)
{
	while (to->size - to->len <= length)
	{
		to->size *= 2;
		to->data = relay_resize(to->data, to->size);
	}
}

/*
 * Return the length of the UTF-8 character that begins at "at", or 0 if none
 * does.  Reads no further than the zero byte that ends the string.
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
	/* Reject overlong forms, surrogates, and codes above U+10FFFF. */
	if ((*at == 0xe0 && at[1] < 0xa0) || (*at == 0xed && at[1] > 0x9f) ||
		(*at == 0xf0 && at[1] < 0x90) || (*at == 0xf4 && at[1] > 0x8f))
		return 0;
	return length;
}
