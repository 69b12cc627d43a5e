// Streams a completion and prints each event, or the error, as a line of JSON.
// usage: node complete.js HOST:PORT PROMPT NUM_TOKENS
'use strict'

const path = require('node:path')
const grpc = require('@grpc/grpc-js')
const { loadSync } = require('@grpc/proto-loader')

const [target, text, numTokens] = process.argv.slice(2)
const definition = loadSync('stepwire/v1/inference.proto', {
  includeDirs: [path.join(__dirname, '..', '..', 'protos')],
  enums: String,
  longs: String,
})
const { InferenceService } = grpc.loadPackageDefinition(definition).stepwire.v1
const client = new InferenceService(target, grpc.credentials.createInsecure())
const sampling = { temperature: 0, maxTokens: Number(numTokens), ignoreEos: true }
const stream = client.generate({ text, sampling }, { deadline: Date.now() + 30_000 })

stream.on('data', (event) => console.log(JSON.stringify(event)))
stream.on('error', ({ code, details, metadata }) => {
  const [statusDetails] = metadata.get('grpc-status-details-bin')
  console.log(JSON.stringify({ error: { code, details, statusDetails: String(statusDetails) } }))
})
stream.on('close', () => client.close())
