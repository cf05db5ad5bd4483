-- idem_request_hash of a JSON body
SELECT idem_request_hash('POST', '/orders', body) FROM bodies WHERE size = :size;
