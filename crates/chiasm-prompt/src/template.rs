//! Chat templates: render a conversation to the prompt's text, as `transformers` 5.20 and vLLM 0.33
//! do.

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

/// The name of the template in its environment.
const TEMPLATE_NAME: &str = "chat_template";

/// The names that a request may not set in `chat_template_kwargs`: arguments of
/// `apply_chat_template` in `transformers`.
const RESERVED_KWARGS: [&str; 13] = [
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

/// Refuses `chat_template_kwargs` that set an argument of the renderer itself. The rule holds for
/// every renderer: the chat template here, and vLLM's code.
///
/// # Errors
/// [`PromptError::ReservedKwarg`] with the first reserved name.
pub fn check_template_kwargs(kwargs: &Map<String, Value>) -> Result<(), PromptError> {
    match kwargs.keys().find(|name| RESERVED_KWARGS.contains(&name.as_str())) {
        Some(name) => Err(PromptError::ReservedKwarg { name: name.clone() }),
        None => Ok(()),
    }
}

/// The names in `chat_template_kwargs` that are ignored. The first two are fields of the request
/// itself; the others are functions of the environment, which a variable must not hide.
const IGNORED_KWARGS: [&str; 10] = [
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

/// A model's compiled chat template. Cheap to clone.
///
/// Rendering is CPU work: tens of microseconds for a short conversation, more for a long one. Keep
/// it off async threads.
///
/// Known differences from Jinja in Python:
/// - `'%s' % x`, a leading `+` and rare filters, functions and methods (`urlencode`, `cycler`,
///   `ljust`) are errors.
/// - Looping over `none` and comparing values of different types are not errors.
/// - `loop.last` is never true in a loop over a string's characters.
/// - `~` and `join` print containers and very large or small floats in minijinja's format.
/// - Integers beyond 64 bits in a request are floats.
#[derive(Clone)]
pub struct ChatTemplate {
    inner: Arc<Inner>,
    /// The template for conversations with tools, if the model has a separate one.
    for_tools: Option<Arc<Inner>>,
}

#[derive(Clone)]
struct Inner {
    environment: Environment<'static>,
    source: String,
    special_tokens: Vec<(String, String)>,
    names: Names,
    format: ContentFormat,
    requires_system_first: bool,
    allows_user_after_result: bool,
    limits: RenderLimits,
    clock: Clock,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("format", &self.inner.format).finish_non_exhaustive()
    }
}

/// The text that marks items of one modality in content of format [`ContentFormat::String`], such
/// as `<|image_pad|>` (vLLM's `get_placeholder_str` of the model class).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkerText<'a> {
    /// The modality of the items.
    pub modality: &'a Modality,
    /// One text for all items; one per item of the conversation if the texts are numbered; empty if
    /// the model's content has no marker texts.
    pub texts: &'a [&'a str],
}

impl<'a> MarkerText<'a> {
    /// Returns the text for the conversation's item `index`, from 0. `None` without texts, or past
    /// the last numbered text.
    fn for_item(&self, index: usize) -> Option<&'a str> {
        match self.texts {
            [shared] => Some(shared),
            numbered => numbered.get(index).copied(),
        }
    }
}

/// The options for rendering a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct RenderOptions {
    /// Ends the prompt with the header of the assistant's next message.
    pub add_generation_prompt: bool,
    /// Leaves the last message open for the model to continue. Not allowed together with
    /// `add_generation_prompt`.
    pub continue_final_message: bool,
    /// The request's `chat_template_kwargs`: variables for the template, such as `enable_thinking`.
    pub kwargs: Map<String, Value>,
    /// The tools that the model may call: a list of `{"type": "function", "function": {"name",
    /// "description", "parameters"}}`.
    pub tools: Option<Arc<Value>>,
}

impl Default for RenderOptions {
    /// Returns the options of a request that sets none: the model writes the assistant's next
    /// message.
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: Map::new(),
            tools: None,
        }
    }
}

/// The limits of one rendering, so that a single request cannot occupy the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenderLimits {
    /// The maximum number of byte-code steps of the template, about 20 ns each. The default of
    /// 20 million is enough for some 40,000 messages with a usual template.
    pub fuel: u64,
    /// The maximum length of the rendered prompt in bytes. The default of 32 MiB is some 8 million
    /// tokens.
    pub bytes: usize,
}

impl Default for RenderLimits {
    fn default() -> Self {
        Self { fuel: 20_000_000, bytes: 32 << 20 }
    }
}

impl ChatTemplate {
    /// Loads the template `given`, which is a file's path or template text. Without it, loads the
    /// template of the model directory, and returns `None` if there is none.
    ///
    /// The search order is vLLM's. A directory with a processor is searched for
    /// `processor_config.json` and `chat_template.json` first. Every directory is then searched for
    /// `chat_template.jinja` and `tokenizer_config.json`. Of several named templates, the one named
    /// `default` is used.
    ///
    /// # Errors
    /// A file cannot be read or parsed, or a template does not compile.
    pub fn from_model_dir(dir: &Path, given: Option<&Path>) -> Result<Option<Self>, PromptError> {
        let (source, for_tools) = match given {
            None => (source::find(dir)?, source::find_for_tools(dir)?),
            Some(given) => (Some(source::from_path_or_text(given)?), None),
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

    /// Returns the template with other limits.
    ///
    /// # Errors
    /// None in practice: this template has already been compiled.
    pub fn with_limits(&self, limits: RenderLimits) -> Result<Self, PromptError> {
        let limited = |inner: &Inner| {
            let source = Source { text: inner.source.clone(), origin: TEMPLATE_NAME.to_owned() };
            let compiled =
                Self::compile(source, inner.special_tokens.clone(), limits, inner.clock.clone())?;
            Ok::<_, PromptError>(compiled.with_content_format(inner.format))
        };
        let for_tools =
            self.for_tools.as_deref().map(limited).transpose()?.map(|template| template.inner);
        Ok(Self { for_tools, ..limited(&self.inner)? })
    }

    /// Returns the template with another content format in place of the detected one.
    #[must_use]
    pub fn with_content_format(mut self, format: ContentFormat) -> Self {
        for inner in std::iter::once(&mut self.inner).chain(&mut self.for_tools) {
            Arc::make_mut(inner).format = format;
        }
        self
    }

    /// Returns the format in which content is passed to the template.
    pub fn content_format(&self) -> ContentFormat {
        self.inner.format
    }

    /// Returns `true` if a system message must be the first message, in either kind of
    /// conversation: with tools or without. vLLM decides it the same way.
    pub fn requires_system_first(&self) -> bool {
        self.variants().any(|inner| inner.requires_system_first)
    }

    /// Returns `true` if a user message may follow a tool's result, in both kinds of conversation.
    /// Templates whose turns alternate expect an assistant message between the two.
    pub fn allows_user_after_result(&self) -> bool {
        self.variants().all(|inner| inner.allows_user_after_result)
    }

    /// Returns `true` if the template knows a role of this name: its source contains `'name'` or
    /// `"name"`.
    pub fn knows_role(&self, name: &str) -> bool {
        self.variants().any(|inner| inner.names.quotes(name))
    }

    /// Returns `true` if the template reads this field of a message's parts. That is the case if
    /// its content format is [`ContentFormat::Parts`] and its source contains `x.name`, `'name'` or
    /// `"name"`.
    pub fn reads_part_field(&self, name: &str) -> bool {
        self.inner.format == ContentFormat::Parts
            && self.variants().any(|inner| inner.names.reads(name))
    }

    /// Returns the templates for conversations without tools and with tools.
    fn variants(&self) -> impl Iterator<Item = &Inner> {
        std::iter::once(&*self.inner).chain(self.for_tools.as_deref())
    }

    /// Returns the source of the template for conversations with tools.
    pub fn source_for_tools(&self) -> &str {
        &self.for_tools.as_ref().unwrap_or(&self.inner).source
    }

    /// Renders a conversation.
    ///
    /// `markers` are the texts that mark media items in content of format
    /// [`ContentFormat::String`]. They are not used otherwise.
    ///
    /// Message texts are not escaped: a special token's text within a message becomes that token,
    /// as in vLLM. [`expand`](crate::expand) refuses markers that come from a message.
    ///
    /// # Errors
    /// The template refuses the messages or fails, a limit is exceeded, or the options or messages
    /// are invalid. All are the request's fault ([`PromptError::is_request_fault`]).
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
        let environment = environment::build(TEMPLATE_NAME, prepared, limits.fuel, clock.clone())
            .map_err(|error| PromptError::TemplateSyntax {
            origin: source.origin,
            reason: error.to_string(),
        })?;
        let requires_system_first = system_place::must_be_first(&source.text);
        let names = Names::from_source(&source.text);
        let source = source.text;
        let inner = Inner {
            environment,
            source,
            special_tokens,
            names,
            format,
            requires_system_first,
            allows_user_after_result: true,
            limits,
            clock,
        };
        let mut template = Self { inner: Arc::new(inner), for_tools: None };
        let allows_user_after_result = result_place::allows_user_after(&template);
        Arc::make_mut(&mut template.inner).allows_user_after_result = allows_user_after_result;
        Ok(template)
    }

    fn render_dicts(
        &self,
        messages: Vec<Value>,
        options: &RenderOptions,
    ) -> Result<String, PromptError> {
        // The request's values may be large, so they are borrowed.
        let mut variables: BTreeMap<&str, Cow<'_, Value>> = BTreeMap::new();
        for (name, text) in &self.inner.special_tokens {
            variables.insert(name, Cow::Owned(text.as_str().into()));
        }
        variables.insert("documents", Cow::Owned(Value::Null));
        check_template_kwargs(&options.kwargs)?;
        for (name, value) in &options.kwargs {
            // In vLLM null and "auto" mean "not set" (`merge_kwargs`, `vllm/renderers/params.py`).
            let is_set = !value.is_null() && value != "auto";
            if is_set && !IGNORED_KWARGS.contains(&name.as_str()) {
                variables.insert(name, Cow::Borrowed(value));
            }
        }
        variables.insert("messages", Cow::Owned(Value::Array(messages)));
        variables.insert(
            "tools",
            options.tools.as_deref().map_or(Cow::Owned(Value::Null), Cow::Borrowed),
        );
        variables.insert("add_generation_prompt", Cow::Owned(options.add_generation_prompt.into()));

        let mut out =
            BoundedBuffer { text: Vec::new(), limit: self.inner.limits.bytes, overrun: false };
        let template = self.inner.environment.get_template(TEMPLATE_NAME);
        let template = template.map_err(|error| self.to_prompt_error(&error))?;
        match template.render_captured_to(JinjaValue::from(Serde(&variables)), &mut out) {
            Ok(_) => {}
            Err(_) if out.overrun => {
                return Err(PromptError::TooLong { limit: self.inner.limits.bytes });
            }
            Err(error) => return Err(self.to_prompt_error(&error)),
        }
        String::from_utf8(out.text)
            .map_err(|error| PromptError::TemplateFailed { reason: error.to_string() })
    }

    /// Converts an error of minijinja. Errors from within macros and filters are wrapped, so the
    /// chain of sources is searched for the specific cause.
    fn to_prompt_error(&self, error: &minijinja::Error) -> PromptError {
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

/// A writer that refuses to grow beyond a number of bytes.
struct BoundedBuffer {
    text: Vec<u8>,
    limit: usize,
    overrun: bool,
}

impl io::Write for BoundedBuffer {
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
