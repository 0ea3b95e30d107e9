//! A scripted engine: the other end of the sockets, without any model.
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

/// More than any step of a test takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// What must become true becomes true, or the test fails.
pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it takes too long")
}

/// A panic in one of the client's tasks would go unnoticed, as nobody waits for them. Makes it end
/// the test run.
pub(crate) fn abort_on_panics_of_the_client() {
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

/// Says hello and returns where to connect to.
pub(crate) async fn hello(endpoints: &EngineEndpoints, rank: u16) -> (DealerSocket, InitMessage) {
    let mut socket = dealer(rank);
    socket.connect(&endpoints.handshake).await.unwrap();
    socket.send(Hello::hello().encode().into()).await.unwrap();
    let init = socket.recv().await.unwrap().into_vec();
    (socket, InitMessage::decode(&init[0]).unwrap())
}

/// Says READY and reports, as an engine that was told where to while it was loading. The handshake
/// socket, to be kept until its message is out.
pub(crate) async fn ready_without_hello(endpoints: &EngineEndpoints) -> DealerSocket {
    let (mut handshake, mut input) = (dealer(0), dealer(0));
    handshake.connect(&endpoints.handshake).await.unwrap();
    handshake.send(Hello::ready().encode().into()).await.unwrap();
    input.connect(&endpoints.input).await.unwrap();
    input.send(report().encode().into()).await.unwrap();
    // The same goes for this one.
    tokio::spawn(async move {
        let _ = tokio::time::timeout(PATIENCE, input.recv()).await;
    });
    handshake
}

/// A client and its engine.
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
    /// Goes through the whole handshake.
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
        // A headless engine keeps this socket until its messages are out.
        tokio::spawn(async move {
            let _ = tokio::time::timeout(PATIENCE, handshake.recv()).await;
        });
        Self { input, output }
    }

    /// Comes back to where it was told to connect to, as an engine whose frontend was started
    /// again: without a word.
    pub(crate) async fn come_back(endpoints: &EngineEndpoints) -> Self {
        let (mut input, mut output) = (dealer(0), PushSocket::new());
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

    /// One output for one request.
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

/// A request for text that nothing is wrong with.
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
