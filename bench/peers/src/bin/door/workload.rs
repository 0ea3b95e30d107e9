//! Who asks what: nine cases of requests and three of long streams, and the next request of each.

use std::error::Error;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use fastrand::Rng;
use peers::body::Pieces;
use peers::picture::{self, Picture};

use crate::origin::Origin;
use crate::words::Words;

/// The name under which all sides serve the model.
pub(crate) const MODEL: &str = "door";
/// Tokens of an answer that is not [`Case::Streaming`]: a few steps, as what comes before the first
/// token is to be measured.
const ANSWER_TOKENS: u64 = 4;
/// Tokens of an answer in [`Case::Streaming`]: so many that what comes before the first of them
/// hardly counts.
const STREAM_TOKENS: u64 = 128;
/// Words of the prompt before such a stream.
const STREAM_WORDS: usize = 16;
/// Tokens of an answer in [`Case::TextAnswered`].
const CHAT_TOKENS: u64 = 64;
/// Tokens of an answer in [`Case::Long`].
pub(crate) const LONG_TOKENS: u64 = 256;
/// Streams that an engine runs at once where answers are long.
pub(crate) const MOST_STREAMS: usize = 512;
/// A function that a request may have the model call, by an engine that calls it in any case.
const TOOLS: &str = r#","tools":[{"type":"function","function":{"name":"note","description":"Keeps a text.","parameters":{"type":"object","properties":{"text":{"type":"string"}},"required":["text"]}}}]"#;
/// Tokens of a text prompt, with what the chat template adds.
pub(crate) const PROMPT_TOKENS: u64 = 1_000;
/// A text prompt may be so much shorter or longer than it should.
const TOLERANCE: u64 = 150;
/// The part of it that is a system prompt, where there is one.
const SYSTEM_PART: f64 = 0.7;
/// Conversations that go on at once in [`Case::Conversation`], each at another length.
const CONVERSATIONS: usize = 16;
/// Questions of a conversation until another one begins in its place: some 6,000 tokens.
const TURNS: usize = 24;
const QUESTION_WORDS: usize = 40;
const ANSWER_WORDS: usize = 200;
/// Seed of all that is drawn, so that each run asks the same. The number has no meaning.
const SEED: u64 = 20_261_122;

/// What is asked over and over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Case {
    /// One picture in every request, in the body.
    RepeatedInline,
    /// One picture in every request, by its URL.
    RepeatedUrl,
    /// A new picture in every request, in the body.
    Distinct,
    /// A new text in every request.
    Text,
    /// A new text in every request, its short answer streamed.
    TextStreamed,
    /// The same with an answer as chats have, token by token.
    TextAnswered,
    /// A new text in every request after a system prompt that all have.
    TextAfterSystem,
    /// The next question of a conversation, after all that was said in it.
    Conversation,
    /// A short text, and an answer that is streamed token by token.
    Streaming,
    /// The same with longer answers, of which something is told besides their text.
    Long(Told, Rate),
}

/// What is asked for beside the text of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// Nothing: the function call that the engine writes is text.
    Plain,
    /// The function call, read from the text.
    Call,
    /// The log probability of each token and of the most likely one.
    Logprobs,
}

/// Steps of an engine per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rate {
    /// This is for few streams.
    Hundred,
    /// This is for so many streams that a machine of two cores, with frontend, engine and clients,
    /// could not keep up with more.
    TwentyFive,
}

/// How fast an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// It waits for nothing.
    Unbounded,
    /// 100 steps per second, in each of which every stream gets a token.
    Steps,
    /// So many steps per second, and an answer that is a function call of more tokens than are
    /// asked for.
    Calls(Rate),
}

impl Rate {
    /// The number.
    pub(crate) fn steps(self) -> u32 {
        match self {
            Self::Hundred => 100,
            Self::TwentyFive => 25,
        }
    }
}

impl Case {
    pub(crate) const ALL: [Self; 7] = [
        Self::RepeatedInline,
        Self::RepeatedUrl,
        Self::Distinct,
        Self::Text,
        Self::TextAfterSystem,
        Self::Conversation,
        Self::Streaming,
    ];

    /// Cases that are measured before engines of this pace.
    pub(crate) fn at(pace: Pace) -> Vec<Self> {
        match pace {
            Pace::Calls(rate) => [Told::Plain, Told::Call, Told::Logprobs].map(|told| Self::Long(told, rate)).into(),
            _ => Self::ALL.into_iter().filter(|case| case.pace() == pace).collect(),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::RepeatedInline => "repeated image, data URI",
            Self::RepeatedUrl => "repeated image, URL",
            Self::Distinct => "distinct images, data URI",
            Self::Text => "1k-token text",
            Self::TextStreamed => "1k-token text, streamed",
            Self::TextAnswered => "1k-token text, 64 tokens streamed",
            Self::TextAfterSystem => "1k-token text, shared system prompt",
            Self::Conversation => "conversation",
            Self::Streaming => "streaming",
            Self::Long(Told::Plain, _) => "plain",
            Self::Long(Told::Call, _) => "tools",
            Self::Long(Told::Logprobs, _) => "logprobs",
        }
    }

    pub(crate) fn pace(self) -> Pace {
        match self {
            Self::Streaming => Pace::Steps,
            Self::Long(_, rate) => Pace::Calls(rate),
            Self::TextAnswered => Pace::Calls(Rate::Hundred),
            _ => Pace::Unbounded,
        }
    }

    /// Whether answers are streamed and long, so that tokens are what is asked for.
    pub(crate) fn is_streamed(self) -> bool {
        matches!(self, Self::Streaming | Self::Long(..))
    }

    /// Clients at once, one measurement for each number.
    pub(crate) fn clients(self) -> &'static [usize] {
        match self {
            Self::Streaming | Self::TextAnswered => &[64],
            Self::Long(_, Rate::Hundred) => &[1, 64],
            Self::Long(_, Rate::TwentyFive) => &[MOST_STREAMS],
            _ => &[1, 16, 64],
        }
    }

    /// Time for which a side is asked each time it is measured: enough for two streams of 1.3 s or
    /// 2.6 s for each client, and for one of 10.3 s.
    pub(crate) fn time(self) -> Duration {
        Duration::from_millis(match self {
            Self::Streaming => 1_500,
            Self::Long(..) | Self::TextAnswered => 3_000,
            _ => 800,
        })
    }

    /// Prompt tokens that a request of this case may have, if one had `counted`.
    pub(crate) fn prompt_tokens(self, counted: u64) -> RangeInclusive<u64> {
        match self {
            Self::Text | Self::TextStreamed | Self::TextAnswered | Self::TextAfterSystem => {
                PROMPT_TOKENS - TOLERANCE..=PROMPT_TOKENS + TOLERANCE
            }
            // The words of a short text are of one token or of two.
            Self::Streaming | Self::Long(..) => 1..=PROMPT_TOKENS,
            // The words of a conversation are of up to a third more tokens, and each message has
            // some of its own.
            Self::Conversation => 1..=(TURNS * (QUESTION_WORDS + ANSWER_WORDS)) as u64 * 4 / 3,
            Self::RepeatedInline | Self::RepeatedUrl | Self::Distinct => counted..=counted,
        }
    }

    /// Tokens that an answer may have. Dynamo's mocker ends some of them early.
    pub(crate) fn answer_tokens(self) -> RangeInclusive<u64> {
        match self {
            Self::Streaming => STREAM_TOKENS..=STREAM_TOKENS,
            Self::TextAnswered => CHAT_TOKENS..=CHAT_TOKENS,
            Self::Long(..) => LONG_TOKENS..=LONG_TOKENS,
            _ => 1..=ANSWER_TOKENS,
        }
    }

    /// Requests whose prompt tokens are compared.
    pub(crate) fn compared(self) -> usize {
        match self {
            // One takes a part of a second, or seconds.
            Self::TextAnswered | Self::Long(_, Rate::Hundred) => 1,
            Self::Long(_, Rate::TwentyFive) => 0,
            _ => 20,
        }
    }

    pub(crate) fn has_image(self) -> bool {
        matches!(self, Self::RepeatedInline | Self::RepeatedUrl | Self::Distinct)
    }
}

/// What was said in a conversation.
struct Conversation {
    /// Messages as JSON writes them in a list.
    messages: String,
    /// Questions that it may have yet.
    left: usize,
}

/// Makes requests, no two alike.
pub(crate) struct Workload {
    origin: Origin,
    pictures: Vec<Picture>,
    repeated: Bytes,
    words: Words,
    /// Words of a text prompt.
    length: usize,
    system: String,
    conversations: Vec<Conversation>,
    rng: Rng,
    made: u64,
}

impl Workload {
    /// A workload of the JPEG files in a folder and the words of a model. The file that sorts first
    /// is the repeated picture.
    pub(crate) fn new(pictures: &Path, model: &Path) -> Result<Self, Box<dyn Error>> {
        let files = picture::read(pictures)?;
        let first = &files[0];
        let mut workload = Self {
            origin: Origin::start(Bytes::copy_from_slice(first))?,
            pictures: files.iter().map(|file| Picture::new(file)).collect::<Result<_, _>>()?,
            repeated: STANDARD.encode(first).into(),
            words: Words::of(model)?,
            length: 0,
            system: String::new(),
            // Else all would be short at once, and long at once.
            conversations: (1..=CONVERSATIONS)
                .map(|nth| Conversation { messages: String::new(), left: TURNS * nth / CONVERSATIONS })
                .collect(),
            rng: Rng::with_seed(SEED),
            made: 0,
        };
        workload.set_length(PROMPT_TOKENS as usize / 2);
        Ok(workload)
    }

    /// Makes text prompts of so many words.
    pub(crate) fn set_length(&mut self, words: usize) {
        self.length = words;
        self.system = self.words.text((words as f64 * SYSTEM_PART) as usize, &mut self.rng);
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// The server that has the repeated picture.
    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Bytes of the picture in the last request, if that was [`Case::Distinct`].
    pub(crate) fn picture_bytes(&self) -> Result<usize, Box<dyn Error>> {
        Ok(STANDARD.decode(self.picture(self.made).concat())?.len())
    }

    /// The file of this number in base64, in two pieces.
    pub(crate) fn picture(&self, number: u64) -> [Bytes; 2] {
        self.pictures[number as usize % self.pictures.len()].numbered(number)
    }

    /// The words that texts are made of.
    pub(crate) fn words(&self) -> &Words {
        &self.words
    }

    /// The next request, to a side that finds the repeated picture at `url`.
    pub(crate) fn next(&mut self, case: Case, url: &str) -> Pieces {
        self.made += 1;
        match case {
            Case::RepeatedInline => self.image("data:image/jpeg;base64,", [self.repeated.clone(), Bytes::new()]),
            Case::RepeatedUrl => self.image(url, [Bytes::new(), Bytes::new()]),
            Case::Distinct => {
                let picture = self.picture(self.made);
                self.image("data:image/jpeg;base64,", picture)
            }
            Case::Text => {
                let text = self.words.text(self.length, &mut self.rng);
                chat(&format!(r#"{{"role":"user","content":"{text}"}}"#))
            }
            Case::TextStreamed => {
                let text = self.words.text(self.length, &mut self.rng);
                streamed(ANSWER_TOKENS, &text, "")
            }
            Case::TextAnswered => {
                let text = self.words.text(self.length, &mut self.rng);
                streamed(CHAT_TOKENS, &text, "")
            }
            Case::TextAfterSystem => {
                let own = self.length - (self.length as f64 * SYSTEM_PART) as usize;
                let (system, text) = (&self.system, self.words.text(own, &mut self.rng));
                chat(&format!(r#"{{"role":"system","content":"{system}"}},{{"role":"user","content":"{text}"}}"#))
            }
            Case::Conversation => self.turn(),
            Case::Streaming => self.stream(STREAM_TOKENS, ""),
            Case::Long(Told::Plain, _) => self.stream(LONG_TOKENS, ""),
            Case::Long(Told::Call, _) => self.stream(LONG_TOKENS, TOOLS),
            Case::Long(Told::Logprobs, _) => self.stream(LONG_TOKENS, r#","logprobs":true,"top_logprobs":1"#),
        }
    }

    /// The text of a function call that has more tokens than any answer: the engine's.
    pub(crate) fn call(&mut self) -> String {
        let text = self.words.text(LONG_TOKENS as usize, &mut self.rng);
        format!("<tool_call>\n{{\"name\": \"note\", \"arguments\": {{\"text\": \"{text}\"}}}}\n</tool_call>")
    }

    /// The next question of the conversation whose turn it is.
    fn turn(&mut self) -> Pieces {
        let [question, answer] = [QUESTION_WORDS, ANSWER_WORDS].map(|words| self.words.text(words, &mut self.rng));
        let at = self.made as usize % CONVERSATIONS;
        let conversation = &mut self.conversations[at];
        if conversation.left == 0 {
            *conversation = Conversation { messages: String::new(), left: TURNS };
        }
        conversation.left -= 1;
        if !conversation.messages.is_empty() {
            conversation.messages.push(',');
        }
        conversation.messages += &format!(r#"{{"role":"user","content":"{question}"}}"#);
        let request = chat(&conversation.messages);
        conversation.messages += &format!(r#",{{"role":"assistant","content":"{answer}"}}"#);
        request
    }

    /// A request for a streamed answer to a short text, with `more` fields.
    fn stream(&mut self, tokens: u64, more: &str) -> Pieces {
        let text = self.words.text(STREAM_WORDS, &mut self.rng);
        streamed(tokens, &text, more)
    }

    /// A request with one image and a question that no other has.
    fn image(&self, url: &str, [first, second]: [Bytes; 2]) -> Pieces {
        let head = format!(
            r#"{{"model":"{MODEL}","max_tokens":{ANSWER_TOKENS},"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"{url}"#
        );
        // The number always has eight digits, so that all questions are of equally many tokens.
        let tail =
            format!(r#""}}}},{{"type":"text","text":"Question {:08}: what is in this picture?"}}]}}]}}"#, self.made);
        [head.into(), first, second, tail.into()].into()
    }
}

/// A request for an answer of so many tokens that is streamed, with `more` fields. The text holds
/// nothing that JSON would want escaped.
fn streamed(tokens: u64, text: &str, more: &str) -> Pieces {
    let body = format!(
        r#"{{"model":"{MODEL}","max_tokens":{tokens},"ignore_eos":true,"stream":true,"stream_options":{{"include_usage":true}},"messages":[{{"role":"user","content":"{text}"}}]{more}}}"#
    );
    [Bytes::from(body)].into()
}

/// The messages hold nothing that JSON would want escaped.
fn chat(messages: &str) -> Pieces {
    let body = format!(r#"{{"model":"{MODEL}","max_tokens":{ANSWER_TOKENS},"messages":[{messages}]}}"#);
    [Bytes::from(body)].into()
}
