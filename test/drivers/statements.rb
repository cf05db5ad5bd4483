# The statements of docs/drivers.md with Ruby's pg, on the database that libpq's variables name.

require 'pg'

$connection = PG.connect

CLAIM = 'SELECT outcome, claim_token, response_status, response_headers, response_body, recovery_point ' \
        'FROM idem_claim($1::text, $2::text, idem_request_hash($3::text, $4::text, $5::text), ' \
        'wait => make_interval(secs => $6::float8))'.freeze
COMPLETE = 'SELECT idem_complete($1::text, $2::text, $3::int, $4::text, $5::text::json, $6::bigint)'.freeze
COMPLETE_BYTES = 'SELECT idem_complete($1::text, $2::text, $3::int, $4::bytea)'.freeze
PUBLISH = 'SELECT idem_publish($1::text, $2::text::jsonb, $3::text) AS message_id'.freeze
ONCE = 'SELECT token FROM idem_once_many($1::text, $2::text[]) AS token'.freeze

def claim(key, body = '{"sku": "teapot"}')
  $connection.exec_params(CLAIM, ['customer-7', key, 'POST', '/orders', body, 5])[0]
end

def check(name, found, wanted)
  puts "#{found == wanted ? 'ok' : 'not ok'} - Ruby pg #{PG::VERSION}: #{name}"
  puts "# #{found.inspect} instead of #{wanted.inspect}" unless found == wanted
end

$connection.transaction do
  check('a new claim', claim('ruby-order-0000001')['outcome'], 'new')
  $connection.exec_params(COMPLETE, ['customer-7', 'ruby-order-0000001', 201, '{"order": 1}',
                                     '{"Content-Type": "application/json"}', nil])
  check('a message has an id', $connection.exec_params(PUBLISH, ['orders', '{"order": 1}', 'customer-7'])
                                          .getvalue(0, 0).length, 36)
end
check('a replay, and numbers are strings', claim('ruby-order-0000001', '{ "sku": "teapot" }').values_at(
  'outcome', 'response_status', 'response_body'), ['replay', '201', '{"order": 1}'])
$connection.transaction do
  claim('ruby-order-0000002')
  $connection.exec_params(COMPLETE_BYTES, ['customer-7', 'ruby-order-0000002', 200, { value: "\0\xff".b, format: 1 }])
end
bytes = $connection.exec_params('SELECT response_bytes FROM idem_lookup($1::text, $2::text)',
                                %w[customer-7 ruby-order-0000002], 1).getvalue(0, 0)
check('bytes are bound with a format', bytes, "\0\xff".b)
list = PG::TextEncoder::Array.new.encode(%w[m1 m2 m1])
check('a list is encoded', $connection.exec_params(ONCE, ['mails', list]).column_values(0), %w[m1 m2])
begin
  claim('short')
rescue PG::Error => e
  check('the SQLSTATE', e.result.error_field(PG::Result::PG_DIAG_SQLSTATE), 'ID001')
end
