-- sha256(convert_to(body::jsonb::text, 'UTF8'))
SELECT sha256(convert_to(body::jsonb::text, 'UTF8')) FROM bodies WHERE size = :size;
