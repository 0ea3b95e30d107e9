//! Chat templates: from a conversation to the prompt's text, as `transformers` 5.20 and vLLM 0.33
//! render it.

mod content_format;
mod continuation;
mod conversation;
mod developer;
mod environment;
mod generation_tag;
mod names;
mod python_filters;
mod python_json;
mod python_strings;
mod python_text;
mod result_place;
mod source;
mod system_place;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use chiasm_types::Modality;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value as JinjaValue};
use serde_json::{Map, Value};

pub use content_format::ContentFormat;

use crate::special_tokens::SpecialTokens;
use crate::{ChatMessage, PromptError};
use environment::{Clock, Raised};
use names::Names;
use source::Source;

const NAME: &str = "chat_template";

/// Names that a request may not set in `chat_template_kwargs`: arguments of `apply_chat_template`
/// in `transformers`.
const RESERVED: [&str; 13] = [
    "chat_template",
    "conversation",
    "conversations",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
];

/// Refuses a request's `chat_template_kwargs` that would replace what a renderer is told by others,
/// whoever renders.
///
/// # Errors
/// [`PromptError::ReservedKwarg`] with the first such name.
pub fn check_template_kwargs(kwargs: &Map<String, Value>) -> Result<(), PromptError> {
    match kwargs.keys().find(|name| RESERVED.contains(&name.as_str())) {
        Some(name) => Err(PromptError::ReservedKwarg { name: name.clone() }),
        None => Ok(()),
    }
}

/// Names in `chat_template_kwargs` that are passed over: fields of the request itself set the first
/// two, and the others are functions of the environment, which a variable must not hide.
const PASSED_OVER: [&str; 10] = [
    "add_generation_prompt",
    "continue_final_message",
    "cycler",
    "dict",
    "joiner",
    "lipsum",
    "namespace",
    "raise_exception",
    "range",
    "strftime_now",
];

/// A model's chat template, compiled. Cheap to clone.
///
/// Rendering is CPU work: tens of microseconds for a short conversation, more for a long one. Keep
/// it off async threads.
///
/// Known differences from Jinja in Python: `'%s' % x` and a leading `+` are errors, and so are rare
/// filters, functions and methods (`urlencode`, `cycler`, `ljust`); looping over `none` and
/// comparing values of different types are not; `loop.last` is never true in a loop over a string's
/// characters; `~` and `join` print containers and very large or small floats in minijinja's way;
/// integers beyond 64 bits in a request are floats.
#[derive(Clone)]
pub struct ChatTemplate {
    inner: Arc<Inner>,
    /// For conversations with functions, where that is another one.
    for_tools: Option<Arc<Inner>>,
}

#[derive(Clone)]
struct Inner {
    environment: Environment<'static>,
    source: String,
    special_tokens: Vec<(String, String)>,
    names: Names,
    format: ContentFormat,
    system_first_alone: bool,
    user_after_result: bool,
    limits: RenderLimits,
    clock: Clock,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("format", &self.inner.format).finish_non_exhaustive()
    }
}

/// What stands for items of one modality in a conversation whose content is one string, such as
/// `<|image_pad|>` (vLLM's `get_placeholder_str` of the model class).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkerText<'a> {
    /// The modality of the items.
    pub modality: &'a Modality,
    /// One text for all items, or where they are numbered one for each item of the conversation, or
    /// none if nothing is written.
    pub texts: &'a [&'a str],
}

impl<'a> MarkerText<'a> {
    /// The text for one of the conversation's items, counted from 0. There may be none, or none any
    /// more.
    fn of(&self, number: usize) -> Option<&'a str> {
        match self.texts {
            [for_all] => Some(for_all),
            numbered => numbered.get(number).copied(),
        }
    }
}

/// The options for rendering a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct RenderOptions {
    /// Ends the prompt with the head of the assistant's next message.
    pub add_generation_prompt: bool,
    /// Leaves the last message open for the model to continue. Excludes `add_generation_prompt`.
    pub continue_final_message: bool,
    /// The request's `chat_template_kwargs`: variables for the template, such as `enable_thinking`.
    pub kwargs: Map<String, Value>,
    /// The functions that the model may call: a list of `{"type": "function", "function": {"name",
    /// "description", "parameters"}}`.
    pub tools: Option<Arc<Value>>,
}

impl Default for RenderOptions {
    /// The options of a request that says nothing: the assistant is next.
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: Map::new(),
            tools: None,
        }
    }
}

/// Bounds that keep one request from occupying the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenderLimits {
    /// Steps of the template's byte code, about 20 ns each. The default of 20 million is some
    /// 40,000 messages of a usual template.
    pub fuel: u64,
    /// Bytes of the rendered prompt. The default of 32 MiB is some 8 million tokens.
    pub bytes: usize,
}

impl Default for RenderLimits {
    fn default() -> Self {
        Self { fuel: 20_000_000, bytes: 32 << 20 }
    }
}

impl ChatTemplate {
    /// The template of the model directory, or the one that is given: a file, or the template
    /// itself. `None` if the directory has none.
    ///
    /// Looked for as vLLM does: in a directory with a processor first in `processor_config.json`
    /// and `chat_template.json`; then, and in every directory, in `chat_template.jinja` and
    /// `tokenizer_config.json` (of several named templates the one named `default`).
    ///
    /// # Errors
    /// Files that can't be read or parsed, and templates that don't compile.
    pub fn from_model_dir(dir: &Path, given: Option<&Path>) -> Result<Option<Self>, PromptError> {
        let (source, for_tools) = match given {
            None => (source::find(dir)?, source::find_for_tools(dir)?),
            Some(given) => (Some(source::given(given)?), None),
        };
        let Some(source) = source else { return Ok(None) };
        let special_tokens = SpecialTokens::from_model_dir(dir)?.named;
        let for_tools = for_tools.filter(|for_tools| for_tools.text != source.text);
        let mut template = Self::compile(
            source,
            special_tokens.clone(),
            RenderLimits::default(),
            environment::system_clock(),
        )?;
        if let Some(for_tools) = for_tools {
            let for_tools = Self::compile(
                for_tools,
                special_tokens,
                RenderLimits::default(),
                environment::system_clock(),
            )?;
            template.for_tools = Some(for_tools.inner);
        }
        Ok(Some(template))
    }

    /// The same template with other limits.
    ///
    /// # Errors
    /// None in practice: the template has compiled before.
    pub fn with_limits(&self, limits: RenderLimits) -> Result<Self, PromptError> {
        let limited = |inner: &Inner| {
            let source = Source { text: inner.source.clone(), origin: NAME.to_owned() };
            let compiled =
                Self::compile(source, inner.special_tokens.clone(), limits, inner.clock.clone())?;
            Ok::<_, PromptError>(compiled.with_content_format(inner.format))
        };
        let for_tools =
            self.for_tools.as_deref().map(limited).transpose()?.map(|template| template.inner);
        Ok(Self { for_tools, ..limited(&self.inner)? })
    }

    /// The same template, which is given content in this form, whatever it seems to want.
    #[must_use]
    pub fn with_content_format(mut self, format: ContentFormat) -> Self {
        for inner in std::iter::once(&mut self.inner).chain(&mut self.for_tools) {
            Arc::make_mut(inner).format = format;
        }
        self
    }

    /// The form of content that the template wants, or is given.
    pub fn content_format(&self) -> ContentFormat {
        self.inner.format
    }

    /// Returns `true` if a system message has to be the first, in conversations with functions or
    /// without. vLLM decides it the same way.
    pub fn takes_system_first_alone(&self) -> bool {
        [Some(&self.inner), self.for_tools.as_ref()]
            .into_iter()
            .flatten()
            .any(|inner| inner.system_first_alone)
    }

    /// Returns `true` if a user message may follow a tool's result, in conversations with functions
    /// and without. Templates whose turns alternate expect an assistant message between the two.
    pub fn allows_user_after_result(&self) -> bool {
        [Some(&self.inner), self.for_tools.as_ref()]
            .into_iter()
            .flatten()
            .all(|inner| inner.user_after_result)
    }

    /// Returns `true` if the template knows a role of this name: it writes `'name'` or `"name"`.
    pub fn knows_role(&self, name: &str) -> bool {
        self.all_names().any(|names| names.quotes(name))
    }

    /// Returns `true` if the template reads a field of this name of a message's parts: it writes
    /// `x.name`, `'name'` or `"name"`, and is given parts.
    pub fn reads_of_parts(&self, name: &str) -> bool {
        self.inner.format == ContentFormat::Parts && self.all_names().any(|names| names.reads(name))
    }

    fn all_names(&self) -> impl Iterator<Item = &Names> {
        [Some(&self.inner), self.for_tools.as_ref()].into_iter().flatten().map(|inner| &inner.names)
    }

    /// The text of the template that writes conversations with functions.
    pub fn source_for_tools(&self) -> &str {
        &self.for_tools.as_ref().unwrap_or(&self.inner).source
    }

    /// Renders a conversation.
    ///
    /// `markers` are the texts that stand for media items where the template wants its content as
    /// one string; they are not used otherwise.
    ///
    /// The text of messages goes into the prompt as it is. If it holds the text of a special token,
    /// the tokenizer will make that token of it, as in vLLM; [`expand`](crate::expand) refuses
    /// image markers that came in that way.
    ///
    /// # Errors
    /// All are the request's fault ([`PromptError::is_request_fault`]): the template's refusal or
    /// failure, limits, and options or messages that make no sense.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        markers: &[MarkerText<'_>],
        options: &RenderOptions,
    ) -> Result<String, PromptError> {
        if messages.is_empty() {
            return Err(PromptError::NoMessages);
        }
        if let Some(for_tools) = self.for_tools.as_ref().filter(|_| options.tools.is_some()) {
            let for_tools = Self { inner: for_tools.clone(), for_tools: None };
            return for_tools.render(messages, markers, options);
        }
        if options.add_generation_prompt && options.continue_final_message {
            return Err(PromptError::ContinueAndGenerate);
        }
        let dicts = conversation::to_dicts(messages, self.inner.format, markers)?;
        let mut dicts = developer::adapt(dicts, &self.inner.source);
        if !options.continue_final_message {
            return self.render_dicts(dicts, options);
        }
        let open_end = continuation::mark(&mut dicts, &self.inner.source)?;
        let rendered = self.render_dicts(dicts, options)?;
        continuation::cut(rendered, &open_end)
    }

    fn compile(
        source: Source,
        special_tokens: Vec<(String, String)>,
        limits: RenderLimits,
        clock: Clock,
    ) -> Result<Self, PromptError> {
        let prepared = environment::prepare_source(&source.text);
        let format = content_format::detect(&prepared);
        let environment = environment::environment(NAME, prepared, limits.fuel, clock.clone())
            .map_err(|error| PromptError::TemplateSyntax {
                origin: source.origin,
                reason: error.to_string(),
            })?;
        let system_first_alone = system_place::is_first_alone(&source.text);
        let names = Names::of(&source.text);
        let source = source.text;
        let inner = Inner {
            environment,
            source,
            special_tokens,
            names,
            format,
            system_first_alone,
            user_after_result: true,
            limits,
            clock,
        };
        let mut template = Self { inner: Arc::new(inner), for_tools: None };
        let user_after_result = result_place::allows_user_after(&template);
        Arc::make_mut(&mut template.inner).user_after_result = user_after_result;
        Ok(template)
    }

    fn render_dicts(
        &self,
        messages: Vec<Value>,
        options: &RenderOptions,
    ) -> Result<String, PromptError> {
        // Those of the request may be large, and are not copied.
        let mut variables: BTreeMap<&str, Cow<'_, Value>> = BTreeMap::new();
        for (name, text) in &self.inner.special_tokens {
            variables.insert(name, Cow::Owned(text.as_str().into()));
        }
        variables.insert("documents", Cow::Owned(Value::Null));
        check_template_kwargs(&options.kwargs)?;
        for (name, value) in &options.kwargs {
            // vLLM takes null and "auto" for "not set" (`merge_kwargs`,
            // `vllm/renderers/params.py`).
            let is_set = !value.is_null() && value != "auto";
            if is_set && !PASSED_OVER.contains(&name.as_str()) {
                variables.insert(name, Cow::Borrowed(value));
            }
        }
        variables.insert("messages", Cow::Owned(Value::Array(messages)));
        variables.insert(
            "tools",
            options.tools.as_deref().map_or(Cow::Owned(Value::Null), Cow::Borrowed),
        );
        variables.insert("add_generation_prompt", Cow::Owned(options.add_generation_prompt.into()));

        let mut out = Bounded { text: Vec::new(), limit: self.inner.limits.bytes, overrun: false };
        let template =
            self.inner.environment.get_template(NAME).map_err(|error| self.explain(&error))?;
        match template.render_captured_to(JinjaValue::from(Serde(&variables)), &mut out) {
            Ok(_) => {}
            Err(_) if out.overrun => {
                return Err(PromptError::TooLong { limit: self.inner.limits.bytes });
            }
            Err(error) => return Err(self.explain(&error)),
        }
        String::from_utf8(out.text)
            .map_err(|error| PromptError::TemplateFailed { reason: error.to_string() })
    }

    /// Errors from within macros and filters come wrapped: the innermost one that says something
    /// counts.
    fn explain(&self, error: &minijinja::Error) -> PromptError {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(current) = cause {
            if let Some(Raised(message)) = current.downcast_ref() {
                return PromptError::TemplateRefused { message: message.clone() };
            }
            if current
                .downcast_ref::<minijinja::Error>()
                .is_some_and(|error| error.kind() == ErrorKind::OutOfFuel)
            {
                return PromptError::TemplateTooSlow { fuel: self.inner.limits.fuel };
            }
            cause = current.source();
        }
        PromptError::TemplateFailed { reason: error.to_string() }
    }
}

/// Takes up to a number of bytes.
struct Bounded {
    text: Vec<u8>,
    limit: usize,
    overrun: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.limit {
            self.overrun = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
