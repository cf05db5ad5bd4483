/**
 * What "prisma generate" makes of a model effects (id BigInt, what String),
 * without its types: the command needs a download that is not npm's.
 */
import { createRequire } from 'node:module'

const require = createRequire(import.meta.url)
const runtime = require('@prisma/client/runtime/client') as { getPrismaClient(config: object): new (options: object) => any }
const { wasm } = require('@prisma/client/runtime/query_compiler_fast_bg.postgresql.wasm-base64.js') as { wasm: string }
const { prismaVersion } = require('@prisma/client/runtime/client') as { prismaVersion?: { client: string; engine: string } }

export const PrismaClient = runtime.getPrismaClient({
  previewFeatures: [], clientVersion: prismaVersion?.client ?? '7', engineVersion: prismaVersion?.engine ?? '', activeProvider: 'postgresql',
  inlineSchema: `generator client {
  provider = "prisma-client"
}
datasource db {
  provider = "postgresql"
}
model effects {
  id   BigInt @id @default(autoincrement())
  what String
}`,
  runtimeDataModel: {
    models: { effects: { fields: [{ name: 'id', kind: 'scalar', type: 'BigInt' }, { name: 'what', kind: 'scalar', type: 'String' }], dbName: null, schema: null } },
    enums: {}, types: {},
  },
  parameterizationSchema: {
    strings: `where effects.findUnique effects.findUniqueOrThrow orderBy cursor effects.findFirst effects.findFirstOrThrow effects.findMany data
    effects.createOne effects.createMany effects.createManyAndReturn effects.updateOne effects.updateMany effects.updateManyAndReturn
    create update effects.upsertOne effects.deleteOne effects.deleteMany having _count _avg _sum _min _max effects.groupBy
    effects.aggregate AND OR NOT id what equals in notIn lt lte gt gte contains startsWith endsWith not set increment decrement
    multiply divide`.split(/\s+/),
    graph: `LAsQBRwAACMAMB0AAAQAEB4AACMAMB8EAAAAASABACUAIQEAAAABACABAAAAAQAgBRwAACMAMB0AAAQAEB4AACMAMB8EACQAISABACUAIQADAAAABAAgAwAABQAwBAAAAQ
    AgAwAAAAQAIAMAAAUAMAQAAAEAIAMAAAAEACADAAAFADAEAAABACACHwQAAAABIAEAAAABAQgAAAkAIAIfBAAAAAEgAQAAAAEBCAAACwAwAQgAAAsAMAIfBAArACEgAQAs
    ACECAAAAAQAgCAAADgAgAh8EACsAISABACwAIQIAAAAEACAIAAAQACACAAAABAAgCAAAEAAgAwAAAAEAIA8AAAkAIBAAAA4AIAEAAAABACABAAAABAAgBRUAACYAIBYAAC
    cAIBcAACoAIBgAACkAIBkAACgAIAUcAAAaADAdAAAXABAeAAAaADAfBAAbACEgAQAcACEDAAAABAAgAwAAFgAwFAAAFwAgAwAAAAQAIAMAAAUAMAQAAAEAIAUcAAAaADAd
    AAAXABAeAAAaADAfBAAbACEgAQAcACENFQAAHgAgFgAAIQAgFwAAIgAgGAAAIgAgGQAAIgAgIQQAAAABIgQAAAAEIwQAAAAEJAQAAAABJQQAAAABJgQAAAABJwQAAAABKw
    QAIAAhDhUAAB4AIBgAAB8AIBkAAB8AICEBAAAAASIBAAAABCMBAAAABCQBAAAAASUBAAAAASYBAAAAAScBAAAAASgBAAAAASkBAAAAASoBAAAAASsBAB0AIQ4VAAAeACAY
    AAAfACAZAAAfACAhAQAAAAEiAQAAAAQjAQAAAAQkAQAAAAElAQAAAAEmAQAAAAEnAQAAAAEoAQAAAAEpAQAAAAEqAQAAAAErAQAdACEIIQIAAAABIgIAAAAEIwIAAAAEJA
    IAAAABJQIAAAABJgIAAAABJwIAAAABKwIAHgAhCyEBAAAAASIBAAAABCMBAAAABCQBAAAAASUBAAAAASYBAAAAAScBAAAAASgBAAAAASkBAAAAASoBAAAAASsBAB8AIQ0V
    AAAeACAWAAAhACAXAAAiACAYAAAiACAZAAAiACAhBAAAAAEiBAAAAAQjBAAAAAQkBAAAAAElBAAAAAEmBAAAAAEnBAAAAAErBAAgACEIIQgAAAABIggAAAAEIwgAAAAEJA
    gAAAABJQgAAAABJggAAAABJwgAAAABKwgAIQAhCCEEAAAAASIEAAAABCMEAAAABCQEAAAAASUEAAAAASYEAAAAAScEAAAAASsEACIAIQUcAAAjADAdAAAEABAeAAAjADAf
    BAAkACEgAQAlACEIIQQAAAABIgQAAAAEIwQAAAAEJAQAAAABJQQAAAABJgQAAAABJwQAAAABKwQAIgAhCyEBAAAAASIBAAAABCMBAAAABCQBAAAAASUBAAAAASYBAAAAAS
    cBAAAAASgBAAAAASkBAAAAASoBAAAAASsBAB8AIQAAAAAABSwEAAAAAS0EAAAAAS4EAAAAAS8EAAAAATAEAAAAAQEsAQAAAAEAAAAABRUABhYABxcACBgACRkACgAAAAAA
    BRUABhYABxcACBgACRkACgECAQIDAQUGAQYHAQcIAQkKAQoMAgsNAwwPAQ0RAg4SBBETARIUARMVAhoYBRsZCw`.replace(/\s+/g, ''),
  },
  compilerWasm: {
    getRuntime: () => Promise.resolve(require('@prisma/client/runtime/query_compiler_fast_bg.postgresql.js')),
    getQueryCompilerWasmModule: () => Promise.resolve(new (globalThis as any).WebAssembly.Module(Buffer.from(wasm, 'base64'))),
    importName: './query_compiler_fast_bg.js',
  },
})
