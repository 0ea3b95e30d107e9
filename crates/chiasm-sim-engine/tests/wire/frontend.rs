//! A scripted frontend.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use chiasm_engine::wire::handshake::identity;
use chiasm_engine::wire::{
    EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineMessage, EngineReady,
    FailureMessage, FinishReason, Hello, InitMessage, MmFeature, MmField, MmItem, SamplingParams,
    Utility, UtilityOutput, Value, WireTensor, output, request,
};
use chiasm_sim_engine::{Pace, SimConfig, SimEngine};
use chiasm_types::{Dtype, Placeholder, TokenId};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use zeromq::{PullSocket, RouterSocket, Socket, SocketEvent, SocketRecv, SocketSend, ZmqMessage};

/// The deadline for anything that must happen, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The token that ends answers in these tests; no byte of a text has this value.
pub(crate) const EOS: TokenId = TokenId(256);

/// Waits for a future, and fails the test instead of hanging.
pub(crate) async fn soon<T>(event: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future)
        .await
        .unwrap_or_else(|_| panic!("waited too long for {event}"))
}

pub(crate) struct Frontend {
    handshake: RouterSocket,
    input: RouterSocket,
    output: PullSocket,
    pub(crate) input_events: BoxStream<'static, SocketEvent>,
    pub(crate) init: InitMessage,
    pub(crate) handshake_address: String,
    rank: u16,
    calls: u64,
}

impl Frontend {
    /// Binds all sockets on free ports.
    pub(crate) async fn bind() -> Self {
        Self::bind_to(["tcp://127.0.0.1:0"; 3]).await
    }

    /// Binds the handshake, input and output sockets.
    pub(crate) async fn bind_to([handshake_at, input_at, output_at]: [&str; 3]) -> Self {
        let mut handshake = RouterSocket::new();
        let mut input = RouterSocket::new();
        let mut output = PullSocket::new();
        let input_events = input.monitor().boxed();
        let handshake_address = handshake.bind(handshake_at).await.unwrap().to_string();
        let input_address = input.bind(input_at).await.unwrap().to_string();
        let output_address = output.bind(output_at).await.unwrap().to_string();
        let init = InitMessage::new(&input_address, &output_address);
        Self { handshake, input, output, input_events, init, handshake_address, rank: 0, calls: 0 }
    }

    pub(crate) fn config(&self) -> SimConfig {
        SimConfig {
            pace: Pace::instant(),
            eos: Some(EOS),
            max_model_len: 1024,
            ..SimConfig::new(&self.handshake_address)
        }
    }

    async fn handshake_message(&mut self) -> Hello {
        let frames = soon("the handshake", self.handshake.recv()).await.unwrap().into_vec();
        assert_eq!(frames[0][..], identity(self.rank));
        assert_eq!(frames.len(), 2);
        Hello::decode(&frames[1]).unwrap()
    }

    /// Closes all sockets and waits until their addresses are free. A dropped `ipc://` listener
    /// removes its file later, when the file may belong to the next listener.
    pub(crate) async fn close(self) {
        for errors in
            [self.handshake.close().await, self.input.close().await, self.output.close().await]
        {
            assert!(errors.is_empty(), "{errors:?}");
        }
    }

    /// Performs the handshake.
    pub(crate) async fn accept(&mut self, rank: u16) -> EngineReady {
        self.rank = rank;
        assert_eq!(self.handshake_message().await, Hello::hello());
        let init = self.init.encode();
        self.handshake.send(self.addressed(vec![init])).await.unwrap();
        let ready = soon("the ready response", self.input.recv()).await.unwrap().into_vec();
        assert_eq!(ready[0][..], identity(rank));
        assert_eq!(self.handshake_message().await, Hello::ready());
        EngineReady::decode(&ready[1]).unwrap()
    }

    /// Starts an engine with this frontend's configuration, changed by `change`.
    pub(crate) async fn engine(change: impl FnOnce(&mut SimConfig)) -> (Self, SimEngine) {
        let mut frontend = Self::bind().await;
        let mut config = frontend.config();
        change(&mut config);
        let engine = SimEngine::start(config);
        frontend.accept(0).await;
        (frontend, engine)
    }

    fn addressed(&self, frames: Vec<Bytes>) -> ZmqMessage {
        let mut message = ZmqMessage::from(Bytes::copy_from_slice(&identity(self.rank)));
        frames.into_iter().for_each(|frame| message.push_back(frame));
        message
    }

    pub(crate) async fn send(&mut self, frames: Vec<Bytes>) {
        let message = self.addressed(frames);
        self.input.send(message).await.unwrap();
    }

    pub(crate) async fn add(&mut self, request: &EngineCoreRequest) {
        self.send(request::encode(request)).await;
    }

    pub(crate) async fn abort(&mut self, ids: &[&str]) {
        let ids: Vec<String> = ids.iter().map(|&id| id.to_owned()).collect();
        self.send(request::encode_abort(&ids)).await;
    }

    /// Calls a method and skips all other messages until its answer.
    pub(crate) async fn call(&mut self, method: &str, args: Vec<Value>) -> Result<Value, String> {
        self.calls += 1;
        let call_id = self.calls;
        self.send(request::encode_utility(&Utility {
            client_index: 0,
            call_id,
            method: method.into(),
            args,
        }))
        .await;
        loop {
            if let Some(UtilityOutput { call_id: answered, result }) =
                self.outputs().await.utility_output
            {
                assert_eq!(answered, call_id);
                return result.map_err(|FailureMessage(message)| message);
            }
        }
    }

    pub(crate) async fn message(&mut self) -> EngineMessage {
        let frames = soon("a message", self.output.recv()).await.unwrap().into_vec();
        output::decode(&frames).unwrap()
    }

    pub(crate) async fn outputs(&mut self) -> EngineCoreOutputs {
        match self.message().await {
            EngineMessage::Outputs(outputs) => outputs,
            EngineMessage::Dead => panic!("the engine died"),
        }
    }

    /// Waits for ENGINE_CORE_DEAD.
    pub(crate) async fn death(&mut self) {
        while self.message().await != EngineMessage::Dead {}
    }

    /// Sends an abort. Returns `false` if the engine is not connected.
    pub(crate) async fn try_abort(&mut self, id: &str) -> bool {
        // A ROUTER learns of connections and losses in the background. Sending to a missing peer
        // fails at once.
        let message = self.addressed(request::encode_abort(&[id.to_owned()]));
        self.input.send(message).await.is_ok()
    }

    /// Returns the next message that the engine sent before it ended; `None` if there is none.
    pub(crate) async fn remaining_message(&mut self) -> Option<EngineMessage> {
        let frames = tokio::time::timeout(Duration::from_millis(100), self.output.recv())
            .await
            .ok()?
            .unwrap();
        Some(output::decode(&frames.into_vec()).unwrap())
    }

    /// Waits until the engine's input connection is closed.
    pub(crate) async fn wait_for_disconnect(&mut self) {
        // A ROUTER notices a loss only while it receives.
        let receiving = async {
            loop {
                self.input.recv().await.unwrap();
            }
        };
        let disconnected = async {
            while let Some(event) = self.input_events.next().await {
                if matches!(event, SocketEvent::Disconnected(_)) {
                    return;
                }
            }
            panic!("the socket is gone");
        };
        soon("the disconnect", async {
            tokio::select! {
                () = receiving => {}
                () = disconnected => {}
            }
        })
        .await;
    }

    /// Receives outputs until `count` requests have ended, and returns the answers by request.
    pub(crate) async fn answers(&mut self, count: usize) -> BTreeMap<String, Answer> {
        let mut answers: BTreeMap<String, Answer> = BTreeMap::new();
        while answers.values().filter(|answer| answer.finish.is_some()).count() < count {
            for output in self.outputs().await.outputs {
                answers.entry(output.request_id.clone()).or_default().add(output);
            }
        }
        answers
    }

    /// Sends one request and waits for its end.
    pub(crate) async fn run(&mut self, request: &EngineCoreRequest) -> Answer {
        self.add(request).await;
        self.answers(1).await.remove(&request.request_id).unwrap()
    }
}

/// The outputs of one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) outputs: Vec<EngineCoreOutput>,
}

impl Answer {
    fn add(&mut self, output: EngineCoreOutput) {
        assert!(self.finish.is_none(), "output after the end: {output:?}");
        self.tokens.extend(&output.new_token_ids);
        self.finish = output.finish_reason;
        self.outputs.push(output);
    }

    /// Returns the tokens that are bytes, as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8(
            self.tokens.iter().filter_map(|token| u8::try_from(token.0).ok()).collect(),
        )
        .unwrap()
    }

    pub(crate) fn cached(&self) -> u64 {
        self.outputs[0].prefill_stats.as_ref().unwrap().num_cached_tokens
    }
}

/// Returns `count` tokens that are distinct for each `family`.
pub(crate) fn tokens(family: u32, count: usize) -> Vec<TokenId> {
    (0..count as u32).map(|at| TokenId(1000 * family + at)).collect()
}

pub(crate) fn greedy(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        max_tokens,
        eos_token_id: Some(EOS),
        all_stop_token_ids: vec![EOS],
        ..SamplingParams::default()
    }
}

/// Returns a request without images.
pub(crate) fn text_request(id: &str, prompt: Vec<TokenId>) -> EngineCoreRequest {
    EngineCoreRequest {
        request_id: id.into(),
        prompt_token_ids: prompt.into(),
        sampling_params: greedy(200),
        arrival_time: 1.0,
        ..EngineCoreRequest::default()
    }
}

/// Returns a Qwen2-VL image of `high × wide` patches.
pub(crate) fn image(high: usize, wide: usize) -> MmItem {
    let rows = high * wide;
    let pixels =
        WireTensor::new(Dtype::U8, vec![rows, 1176], Bytes::from(vec![7; rows * 1176])).unwrap();
    let grid: Vec<u8> =
        [1, high as i64, wide as i64].iter().flat_map(|side| side.to_le_bytes()).collect();
    let grid = WireTensor::new(Dtype::I64, vec![3], grid.into()).unwrap();
    MmItem(vec![
        ("pixel_values".into(), MmField::flat(pixels, rows)),
        ("image_grid_thw".into(), MmField::batched(grid, true)),
    ])
}

/// Returns the digest of the pixels of [`image`] as in an answer.
pub(crate) fn image_digest(high: usize, wide: usize) -> String {
    blake3::hash(&vec![7; high * wide * 1176]).to_hex()[..8].to_owned()
}

/// Returns a media item at `offset`.
pub(crate) fn feature(hash: &str, data: Option<MmItem>, offset: usize, length: usize) -> MmFeature {
    MmFeature {
        data,
        modality: "image".into(),
        identifier: hash.into(),
        position: Placeholder { offset, length, is_embed: None },
        mm_hash: Some(hash.into()),
    }
}

/// Returns a request with 20 tokens, an image of 224 × 280 pixels in 80 tokens, and 9 tokens.
pub(crate) fn image_request(id: &str, hash: &str, data: Option<MmItem>) -> EngineCoreRequest {
    let prompt = [tokens(1, 20), vec![TokenId(999); 80], tokens(2, 9)].concat();
    EngineCoreRequest { mm_features: vec![feature(hash, data, 20, 80)], ..text_request(id, prompt) }
}
