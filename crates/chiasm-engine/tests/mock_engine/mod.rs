//! A scripted engine: the engine's side of the sockets, without a model.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::sync::Once;
use std::time::Duration;

use bytes::Bytes;
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineReady,
    FinishReason, Hello, InitMessage, SamplingParams, handshake, output, request,
};
use chiasm_engine::{EngineClient, EngineEndpoints, PendingEngine};
use chiasm_types::TokenId;
use zeromq::{DealerSocket, PushSocket, Socket, SocketOptions, SocketRecv, SocketSend, ZmqMessage};

/// The timeout of a test's steps, longer than any step takes on a busy machine.
pub(crate) const STEP_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits for a future, and fails the test after [`STEP_TIMEOUT`].
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(STEP_TIMEOUT, future).await.expect("it takes too long")
}

/// Makes a panic in one of the client's tasks end the test run. No one awaits these tasks, so the
/// panic would not fail the test.
pub(crate) fn abort_on_client_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            print(panic);
            if panic.location().is_some_and(|location| location.file().contains("src/client")) {
                std::process::abort();
            }
        }));
    });
}

pub(crate) struct MockEngine {
    pub(crate) input: DealerSocket,
    pub(crate) output: PushSocket,
}

/// The order of the last two messages of the handshake, which is not fixed.
#[derive(Clone, Copy)]
pub(crate) enum Order {
    ReportFirst,
    ReadyFirst,
}

pub(crate) fn report() -> EngineReady {
    EngineReady {
        max_model_len: 512,
        num_gpu_blocks: 100,
        block_size: 16,
        effective_attention_block_size: Some(16),
        dtype: "bfloat16".into(),
        vllm_version: "0.32.0".into(),
        max_num_seqs: 8,
        max_num_batched_tokens: 2048,
        instance_id: "mock".into(),
        ..EngineReady::default()
    }
}

fn dealer(rank: u16) -> DealerSocket {
    let mut options = SocketOptions::default();
    options.peer_identity(handshake::identity(rank).to_vec().try_into().unwrap());
    DealerSocket::with_options(options)
}

/// Sends HELLO. Returns the handshake socket.
pub(crate) async fn send_hello(endpoints: &EngineEndpoints, rank: u16) -> DealerSocket {
    let mut socket = dealer(rank);
    socket.connect(&endpoints.handshake).await.unwrap();
    socket.send(Hello::hello().encode().into()).await.unwrap();
    socket
}

/// Sends HELLO. Returns the handshake socket and the received INIT.
pub(crate) async fn hello(endpoints: &EngineEndpoints, rank: u16) -> (DealerSocket, InitMessage) {
    let mut socket = send_hello(endpoints, rank).await;
    let init = socket.recv().await.unwrap().into_vec();
    (socket, InitMessage::decode(&init[0]).unwrap())
}

/// Sends READY and a report without HELLO, as an engine whose frontend ended while it loaded its
/// model. Returns the handshake socket, which must be kept until its message is sent.
pub(crate) async fn ready_without_hello(endpoints: &EngineEndpoints) -> DealerSocket {
    let mut handshake = dealer(0);
    let mut input = dealer(0);
    handshake.connect(&endpoints.handshake).await.unwrap();
    handshake.send(Hello::ready().encode().into()).await.unwrap();
    input.connect(&endpoints.input).await.unwrap();
    input.send(report().encode().into()).await.unwrap();
    // This socket must be kept too.
    tokio::spawn(async move {
        let _ = tokio::time::timeout(STEP_TIMEOUT, input.recv()).await;
    });
    handshake
}

/// Runs the handshake and returns the client and its engine.
pub(crate) async fn connect(
    pending: PendingEngine,
    report: EngineReady,
    order: Order,
) -> (EngineClient, MockEngine) {
    let endpoints = pending.endpoints().clone();
    let (client, engine) =
        soon(async { tokio::join!(pending.ready(), MockEngine::start(&endpoints, report, order)) })
            .await;
    (client.unwrap(), engine)
}

impl MockEngine {
    /// Starts an engine and runs its side of the handshake.
    pub(crate) async fn start(
        endpoints: &EngineEndpoints,
        report: EngineReady,
        order: Order,
    ) -> Self {
        let (mut handshake, init) = hello(endpoints, 0).await;
        let mut output = PushSocket::new();
        output.connect(&init.addresses.outputs[0]).await.unwrap();
        let mut input = dealer(0);
        input.connect(&init.addresses.inputs[0]).await.unwrap();
        let ready: ZmqMessage = Hello::ready().encode().into();
        match order {
            Order::ReportFirst => {
                input.send(report.encode().into()).await.unwrap();
                handshake.send(ready).await.unwrap();
            }
            Order::ReadyFirst => {
                handshake.send(ready).await.unwrap();
                input.send(report.encode().into()).await.unwrap();
            }
        }
        // A headless engine keeps this socket until its messages are sent.
        tokio::spawn(async move {
            let _ = tokio::time::timeout(STEP_TIMEOUT, handshake.recv()).await;
        });
        Self { input, output }
    }

    /// Reconnects to the frontend's addresses without a message, as an engine whose frontend was
    /// restarted.
    pub(crate) async fn reconnect(endpoints: &EngineEndpoints) -> Self {
        let mut input = dealer(0);
        let mut output = PushSocket::new();
        output.connect(&endpoints.output).await.unwrap();
        input.connect(&endpoints.input).await.unwrap();
        Self { input, output }
    }

    pub(crate) async fn receive(&mut self) -> ClientMessage {
        let message = soon(self.input.recv()).await.unwrap();
        request::decode(&message.into_vec()).unwrap()
    }

    pub(crate) async fn receive_add(&mut self) -> EngineCoreRequest {
        match self.receive().await {
            ClientMessage::Add(request) => *request,
            other => panic!("not an ADD: {other:?}"),
        }
    }

    pub(crate) async fn send(&mut self, outputs: EngineCoreOutputs) {
        self.send_frames(output::encode(&outputs)).await;
    }

    pub(crate) async fn send_frames(&mut self, frames: Vec<Bytes>) {
        self.output.send(frames.try_into().unwrap()).await.unwrap();
    }

    /// Sends one output of one request.
    pub(crate) async fn answer(
        &mut self,
        request_id: &str,
        token: u32,
        finish_reason: Option<FinishReason>,
    ) {
        let output = EngineCoreOutput {
            request_id: request_id.into(),
            new_token_ids: vec![TokenId(token)],
            finish_reason,
            ..EngineCoreOutput::default()
        };
        self.send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
            .await;
    }
}

/// Creates a valid request for text.
pub(crate) fn text_request(request_id: &str) -> EngineCoreRequest {
    EngineCoreRequest {
        request_id: request_id.into(),
        prompt_token_ids: (10..20).map(TokenId).collect::<Vec<_>>().into(),
        sampling_params: SamplingParams {
            max_tokens: 4,
            temperature: 0.0,
            ..SamplingParams::default()
        },
        arrival_time: 1.0,
        ..EngineCoreRequest::default()
    }
}
