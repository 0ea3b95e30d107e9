//! The cases of load, and the requests of each case.

use std::error::Error;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use fastrand::Rng;

use crate::origin::Origin;
use crate::picture::{self, Format, Picture};
use crate::pieces::Pieces;
use crate::words::Words;

/// The name under which all sides serve the model.
pub(crate) const MODEL: &str = "door";
/// The number of tokens of an answer where the time before the first token is measured.
const ANSWER_TOKENS: u64 = 4;
/// The number of tokens of an answer in [`Case::Streaming`]. It is so large that the time before
/// the first token hardly counts.
const STREAM_TOKENS: u64 = 128;
/// The number of words of the prompt of a stream.
const STREAM_WORDS: usize = 16;
/// The number of tokens of an answer in [`Case::TextAnswered`].
const CHAT_TOKENS: u64 = 64;
/// The number of tokens of an answer in [`Case::Long`].
pub(crate) const LONG_TOKENS: u64 = 256;
/// The most streams that a machine of two cores can handle.
const MAX_STREAMS: usize = 512;
/// The maximum number of concurrent streams of an engine with long answers. Memory is measured with
/// nearly as many.
pub(crate) const ENGINE_STREAMS: usize = 1_024;
/// A function that the model may call. The engine calls it in any case.
const TOOLS: &str = concat!(
    r#","tools":[{"type":"function","function":{"name":"note","description":"Keeps a text.","#,
    r#""parameters":{"type":"object","properties":{"text":{"type":"string"}},"#,
    r#""required":["text"]}}}]"#
);
/// The number of tokens of a text prompt, including the chat template's, and its tolerance.
pub(crate) const PROMPT_TOKENS: u64 = 1_000;
const TOLERANCE_TOKENS: u64 = 150;
/// The part of a prompt that is the system prompt, if it has one.
const SYSTEM_PART: f64 = 0.7;
/// The number of concurrent conversations in [`Case::Conversation`], each of another length.
const CONVERSATIONS: usize = 16;
/// The number of questions until a conversation ends and another one begins: 6,000 tokens.
const TURNS: usize = 24;
const QUESTION_WORDS: usize = 40;
const ANSWER_WORDS: usize = 200;
/// The number of pictures of a request in [`Case::Burst`].
const BURST_PICTURES: u64 = 5;
/// The seed of all requests, so that each run has the same. The number has no meaning.
const SEED: u64 = 20_261_122;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Case {
    /// The same picture in the body of each request.
    RepeatedInline,
    /// The same picture by its URL in each request.
    RepeatedUrl,
    /// A new picture in the body of each request.
    Distinct,
    /// [`BURST_PICTURES`] new pictures in the body of each request, and a streamed answer. All
    /// requests start at once.
    Burst(Format),
    /// A new text in each request.
    Text,
    /// The same with a short, streamed answer.
    TextStreamed,
    /// The same with a streamed answer of a chat's length.
    TextAnswered,
    /// A new text after a shared system prompt.
    TextAfterSystem,
    /// The next question of a conversation, after all its earlier messages.
    Conversation,
    /// A short text with a streamed answer.
    Streaming,
    /// The same with longer answers and a kind of output.
    Long(Output, Rate),
}

/// The output of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Text. The function call that the engine writes is text too.
    Plain,
    /// The function call, parsed from the text.
    Call,
    /// Text with the log probability of each token and of the most likely one.
    Logprobs,
}

/// The steps of an engine per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rate {
    /// 100 steps, for few streams.
    Hundred,
    /// 25 steps, for as many streams as a machine of two cores can handle with frontend, engine and
    /// clients.
    TwentyFive,
}

/// The speed of engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    Unbounded,
    /// 100 steps per second, each with a token of every stream.
    Steps,
    /// Steps at a rate, with answers that are a function call of more tokens than requested.
    Calls(Rate),
}

impl Pace {
    pub(crate) fn steps_per_second(self) -> Option<u32> {
        match self {
            Self::Unbounded => None,
            Self::Steps | Self::Calls(Rate::Hundred) => Some(100),
            Self::Calls(Rate::TwentyFive) => Some(25),
        }
    }

    pub(crate) fn has_long_answers(self) -> bool {
        matches!(self, Self::Calls(_))
    }
}

/// The properties of a case.
pub(crate) struct CaseSpec {
    pub(crate) name: &'static str,
    /// The numbers of concurrent clients, with a measurement for each.
    pub(crate) clients: &'static [usize],
    /// The duration of a measurement.
    pub(crate) time: Duration,
    /// The number of tokens of an answer. Dynamo's mocker ends some answers early.
    pub(crate) answer_tokens: RangeInclusive<u64>,
    /// The number of requests whose prompt tokens are compared.
    pub(crate) compared: usize,
}

impl Case {
    /// Returns the cases that `door` and `stream` measure with engines of this pace.
    pub(crate) fn with_pace(pace: Pace) -> Vec<Self> {
        match pace {
            Pace::Unbounded => vec![
                Self::RepeatedInline,
                Self::RepeatedUrl,
                Self::Distinct,
                Self::Text,
                Self::TextAfterSystem,
                Self::Conversation,
                Self::Burst(Format::Jpeg),
                Self::Burst(Format::Png),
            ],
            Pace::Steps => vec![Self::Streaming],
            Pace::Calls(rate) => [Output::Plain, Output::Call, Output::Logprobs]
                .map(|output| Self::Long(output, rate))
                .into(),
        }
    }

    pub(crate) fn spec(self) -> CaseSpec {
        let request = |name| CaseSpec {
            name,
            clients: &[1, 16, 64],
            time: Duration::from_millis(800),
            answer_tokens: 1..=ANSWER_TOKENS,
            compared: 20,
        };
        let stream = |name, tokens, time_ms| CaseSpec {
            clients: &[64],
            time: Duration::from_millis(time_ms),
            answer_tokens: tokens..=tokens,
            ..request(name)
        };
        match self {
            Self::RepeatedInline => request("repeated image, data URI"),
            Self::RepeatedUrl => request("repeated image, URL"),
            Self::Distinct => request("distinct images, data URI"),
            Self::Burst(format) => CaseSpec {
                clients: &[1, 4, 16],
                time: Duration::ZERO,
                compared: 1,
                ..request(match format {
                    Format::Jpeg => "burst of JPEG",
                    Format::Png => "burst of PNG",
                })
            },
            Self::Text => request("1k-token text"),
            Self::TextStreamed => request("1k-token text, streamed"),
            Self::TextAfterSystem => request("1k-token text, shared system prompt"),
            Self::Conversation => request("conversation"),
            // Enough time for two streams of 1.3 s for each client.
            Self::Streaming => stream("streaming", STREAM_TOKENS, 1_500),
            Self::TextAnswered => CaseSpec {
                compared: 1,
                ..stream("1k-token text, 64 tokens streamed", CHAT_TOKENS, 3_000)
            },
            Self::Long(output, rate) => {
                let name = match output {
                    Output::Plain => "plain",
                    Output::Call => "tools",
                    Output::Logprobs => "logprobs",
                };
                // Two streams of 2.6 s for each client, or one of 10.3 s.
                let stream = stream(name, LONG_TOKENS, 3_000);
                match rate {
                    Rate::Hundred => CaseSpec { clients: &[1, 64], compared: 1, ..stream },
                    Rate::TwentyFive => CaseSpec { clients: &[MAX_STREAMS], compared: 0, ..stream },
                }
            }
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.spec().name
    }

    /// Returns `true` if answers are long streams, whose tokens are measured instead of requests.
    pub(crate) fn is_streamed(self) -> bool {
        matches!(self, Self::Streaming | Self::Long(..))
    }

    pub(crate) fn has_image(self) -> bool {
        matches!(self, Self::RepeatedInline | Self::RepeatedUrl | Self::Distinct | Self::Burst(_))
    }

    /// Returns `true` if each client sends one request, all at once.
    pub(crate) fn is_burst(self) -> bool {
        matches!(self, Self::Burst(_))
    }

    /// Returns the valid numbers of prompt tokens of this case, if one request had `counted`.
    pub(crate) fn prompt_tokens(self, counted: u64) -> RangeInclusive<u64> {
        match self {
            Self::Text | Self::TextStreamed | Self::TextAnswered | Self::TextAfterSystem => {
                PROMPT_TOKENS - TOLERANCE_TOKENS..=PROMPT_TOKENS + TOLERANCE_TOKENS
            }
            // The words of a short text have one token or two.
            Self::Streaming | Self::Long(..) => 1..=PROMPT_TOKENS,
            // A conversation has up to a third more tokens than words, with those of the template.
            Self::Conversation => 1..=(TURNS * (QUESTION_WORDS + ANSWER_WORDS)) as u64 * 4 / 3,
            Self::RepeatedInline | Self::RepeatedUrl | Self::Distinct | Self::Burst(_) => {
                counted..=counted
            }
        }
    }
}

struct Conversation {
    /// The messages as a JSON list, without brackets.
    messages: String,
    remaining_questions: usize,
}

/// A generator of requests that are all different.
pub(crate) struct Workload {
    origin: Origin,
    pictures: Vec<Picture>,
    /// The pictures of bursts, by format.
    burst: [Vec<Picture>; 2],
    /// The file of the repeated picture, in base64.
    repeated: Bytes,
    words: Words,
    /// The number of words of a text prompt.
    prompt_words: usize,
    system: String,
    conversations: Vec<Conversation>,
    rng: Rng,
    requests: u64,
}

impl Workload {
    /// Creates a workload from the JPEG files in a folder, the files of bursts in another, and the
    /// words of a model. The first JPEG file by name is the repeated picture.
    pub(crate) fn new(pictures: &Path, burst: &Path, model: &Path) -> Result<Self, Box<dyn Error>> {
        let files = picture::read(pictures, Format::Jpeg)?;
        let parse = |files: &[Vec<u8>]| -> Result<Vec<Picture>, Box<dyn Error>> {
            files.iter().map(|file| Picture::new(file)).collect()
        };
        let first = &files[0];
        // The conversations start with different lengths.
        let conversation = |number| Conversation {
            messages: String::new(),
            remaining_questions: TURNS * number / CONVERSATIONS,
        };
        let mut workload = Self {
            origin: Origin::start(Bytes::copy_from_slice(first))?,
            pictures: parse(&files)?,
            burst: [
                parse(&picture::read(burst, Format::Jpeg)?)?,
                parse(&picture::read(burst, Format::Png)?)?,
            ],
            repeated: STANDARD.encode(first).into(),
            words: Words::read(model)?,
            prompt_words: 0,
            system: String::new(),
            conversations: (1..=CONVERSATIONS).map(conversation).collect(),
            rng: Rng::with_seed(SEED),
            requests: 0,
        };
        workload.set_prompt_words(PROMPT_TOKENS as usize / 2);
        Ok(workload)
    }

    pub(crate) fn set_prompt_words(&mut self, words: usize) {
        self.prompt_words = words;
        self.system = self.words.text((words as f64 * SYSTEM_PART) as usize, &mut self.rng);
    }

    pub(crate) fn prompt_words(&self) -> usize {
        self.prompt_words
    }

    /// Returns the server of the repeated picture.
    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns the size of the picture in the last request of [`Case::Distinct`].
    pub(crate) fn picture_bytes(&self) -> Result<usize, Box<dyn Error>> {
        Ok(STANDARD.decode(self.picture(self.requests).concat())?.len())
    }

    /// Returns the file of this number in base64, in two pieces.
    pub(crate) fn picture(&self, number: u64) -> [Bytes; 2] {
        self.pictures[number as usize % self.pictures.len()].numbered(number)
    }

    pub(crate) fn words(&self) -> &Words {
        &self.words
    }

    /// Returns the next request to a side for which the repeated picture is at `url`.
    pub(crate) fn next(&mut self, case: Case, url: &str) -> Pieces {
        self.requests += 1;
        match case {
            Case::RepeatedInline => {
                self.image(Format::Jpeg.data_uri(), [self.repeated.clone(), Bytes::new()])
            }
            Case::RepeatedUrl => self.image(url, [Bytes::new(), Bytes::new()]),
            Case::Distinct => self.image(Format::Jpeg.data_uri(), self.picture(self.requests)),
            Case::Burst(format) => self.burst(format),
            Case::Text => {
                let text = self.words.text(self.prompt_words, &mut self.rng);
                chat(&user_message(&text))
            }
            Case::TextStreamed => self.stream(self.prompt_words, ANSWER_TOKENS, ""),
            Case::TextAnswered => self.stream(self.prompt_words, CHAT_TOKENS, ""),
            Case::TextAfterSystem => {
                let words = self.prompt_words - (self.prompt_words as f64 * SYSTEM_PART) as usize;
                let system = &self.system;
                let question = user_message(&self.words.text(words, &mut self.rng));
                chat(&format!(r#"{{"role":"system","content":"{system}"}},{question}"#))
            }
            Case::Conversation => self.question(),
            Case::Streaming => self.stream(STREAM_WORDS, STREAM_TOKENS, ""),
            Case::Long(Output::Plain, _) => self.stream(STREAM_WORDS, LONG_TOKENS, ""),
            Case::Long(Output::Call, _) => self.stream(STREAM_WORDS, LONG_TOKENS, TOOLS),
            Case::Long(Output::Logprobs, _) => {
                self.stream(STREAM_WORDS, LONG_TOKENS, r#","logprobs":true,"top_logprobs":1"#)
            }
        }
    }

    /// Returns the text of a function call with more tokens than any answer, for engines.
    pub(crate) fn call(&mut self) -> String {
        let text = self.words.text(LONG_TOKENS as usize, &mut self.rng);
        let call = format!(r#"{{"name": "note", "arguments": {{"text": "{text}"}}}}"#);
        format!("<tool_call>\n{call}\n</tool_call>")
    }

    /// Returns the next question of the conversation whose turn it is.
    fn question(&mut self) -> Pieces {
        let [question, answer] =
            [QUESTION_WORDS, ANSWER_WORDS].map(|words| self.words.text(words, &mut self.rng));
        let number = self.requests as usize % CONVERSATIONS;
        let conversation = &mut self.conversations[number];
        if conversation.remaining_questions == 0 {
            *conversation = Conversation { messages: String::new(), remaining_questions: TURNS };
        }
        conversation.remaining_questions -= 1;
        if !conversation.messages.is_empty() {
            conversation.messages.push(',');
        }
        conversation.messages += &user_message(&question);
        let request = chat(&conversation.messages);
        conversation.messages += &format!(r#",{{"role":"assistant","content":"{answer}"}}"#);
        request
    }

    /// Returns a request for a streamed answer to a text, with additional `fields`.
    fn stream(&mut self, words: usize, tokens: u64, fields: &str) -> Pieces {
        let message = user_message(&self.words.text(words, &mut self.rng));
        let options = streaming(tokens);
        let body = format!(r#"{{"model":"{MODEL}",{options},"messages":[{message}]{fields}}}"#);
        [Bytes::from(body)].into()
    }

    /// Returns a request with one image and a new question.
    fn image(&self, url: &str, picture: [Bytes; 2]) -> Pieces {
        let options = format!(r#""max_tokens":{ANSWER_TOKENS}"#);
        image_request(&options, url, [picture], self.requests)
    }

    /// Returns a request with new images and a new question.
    fn burst(&self, format: Format) -> Pieces {
        let pictures = &self.burst[format as usize];
        let numbers = (0..BURST_PICTURES).map(|image| self.requests * BURST_PICTURES + image);
        let new = |number: u64| pictures[number as usize % pictures.len()].numbered(number);
        let options = streaming(ANSWER_TOKENS);
        image_request(&options, format.data_uri(), numbers.map(new), self.requests)
    }
}

/// Returns the fields of a request for a streamed answer of this length.
pub(crate) fn streaming(tokens: u64) -> String {
    let stream = r#""stream":true,"stream_options":{"include_usage":true}"#;
    format!(r#""max_tokens":{tokens},"ignore_eos":true,{stream}"#)
}

/// Returns a request with images, whose URLs begin with `url`, and a question with a number. All
/// questions have the same number of tokens, because the number always has eight digits.
pub(crate) fn image_request(
    options: &str,
    url: &str,
    pictures: impl IntoIterator<Item = [Bytes; 2]>,
    number: u64,
) -> Pieces {
    let message = r#"{"role":"user","content":["#;
    let head = format!(r#"{{"model":"{MODEL}",{options},"messages":[{message}"#);
    let mut pieces = vec![Bytes::from(head)];
    for picture in pictures {
        let start = format!(r#"{{"type":"image_url","image_url":{{"url":"{url}"#);
        pieces.push(start.into());
        pieces.extend(picture);
        pieces.push(r#""}},"#.into());
    }
    let question = format!("Question {number:08}: what is in this picture?");
    pieces.push(format!(r#"{{"type":"text","text":"{question}"}}]}}]}}"#).into());
    pieces.into_iter().collect()
}

// The texts contain nothing that JSON would escape.

fn user_message(text: &str) -> String {
    format!(r#"{{"role":"user","content":"{text}"}}"#)
}

fn chat(messages: &str) -> Pieces {
    let options = format!(r#""model":"{MODEL}","max_tokens":{ANSWER_TOKENS}"#);
    [Bytes::from(format!(r#"{{{options},"messages":[{messages}]}}"#))].into()
}
