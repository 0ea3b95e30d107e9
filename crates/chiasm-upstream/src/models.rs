//! Which of the models that a server lists is the one that is served here.

use serde::Deserialize;

/// Names that are told of a list, and characters of each: a server may list anything.
const TOLD: usize = 5;
const TOLD_CHARS: usize = 100;

/// What the model that is served here may be called.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    /// What the operator says that this server calls it.
    pub(crate) told: Option<String>,
    /// What it is called here: by clients, and as it was given.
    pub(crate) here: Vec<String>,
}

/// What a server lists at `/v1/models`.
#[derive(Deserialize)]
pub(crate) struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<usize>,
    /// What an adapter is of.
    parent: Option<String>,
    /// Where vLLM has it from: the name that it was started with.
    root: Option<String>,
}

/// The model of a server that gets this frontend's requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The name that it has there.
    pub(crate) name: String,
    /// Tokens of prompt and answer together, if that is told.
    pub(crate) max_model_len: Option<usize>,
    /// Whether the name is one that the model has here, if it has any, or that the operator has
    /// given.
    pub(crate) is_expected: bool,
}

/// The model that is meant can't be told from a server's list.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ModelError {
    /// The operator has named a model that is not listed.
    #[error("it has no model {name} (model= behind its address), but {listed}")]
    Missing { name: String, listed: String },
    /// Any of several could be meant.
    #[error(
        "it has several models and none that is called {}, but {listed}: say which one is meant \
         (model=NAME behind its address)",
        here.join(" or ")
    )]
    Ambiguous { here: Vec<String>, listed: String },
    /// The tokens of prompt and answer together are not told.
    #[error("it does not tell its model's context (max_model_len of /v1/models)")]
    NoContext,
}

impl Models {
    /// The model that is meant; `None` if none is listed. A server's only model is meant whatever
    /// it is called: many servers have a name of their own for what others know by another one.
    ///
    /// # Errors
    /// The model is certainly not there, or any of several could be meant.
    pub(crate) fn find(&self, names: &Names) -> Result<Option<Found>, ModelError> {
        if let Some(told) = &names.told {
            let found = self.data.iter().find(|model| model.id == *told);
            let missing = || ModelError::Missing { name: told.clone(), listed: self.listed() };
            return found.map(|model| Some(model.found(true))).ok_or_else(missing);
        }
        let bases = || self.data.iter().filter(|model| model.parent.is_none());
        let is_called = |model: &&Model, same: fn(&str, &str) -> bool| {
            let own = [Some(&model.id), model.root.as_ref()];
            own.into_iter().flatten().any(|own| names.here.iter().any(|here| same(own, here)))
        };
        let exactly = bases().find(|model| is_called(model, |own, here| own == here));
        if let Some(model) =
            exactly.or_else(|| bases().find(|model| is_called(model, have_one_last_part)))
        {
            return Ok(Some(model.found(true)));
        }
        let mut bases = bases();
        match (bases.next(), bases.next()) {
            (None, _) => Ok(None),
            (Some(only), None) => Ok(Some(only.found(names.here.is_empty()))),
            _ => Err(ModelError::Ambiguous { here: names.here.clone(), listed: self.listed() }),
        }
    }

    /// The same of a server that has to tell the tokens of prompt and answer together, which come
    /// beside the model.
    ///
    /// # Errors
    /// There is no such model, or its context is not told.
    pub(crate) fn find_with_context(&self, names: &Names) -> Result<(Found, usize), ModelError> {
        let found = self
            .find(names)?
            .and_then(|found| found.max_model_len.map(|max_model_len| (found, max_model_len)));
        found.ok_or(ModelError::NoContext)
    }

    fn listed(&self) -> String {
        let names: Vec<_> = self.data.iter().take(TOLD).map(|model| shown(&model.id)).collect();
        let more = if self.data.len() > TOLD { " and others" } else { "" };
        if names.is_empty() {
            "none at all".to_owned()
        } else {
            format!("{}{more}", names.join(", "))
        }
    }
}

impl Model {
    fn found(&self, is_expected: bool) -> Found {
        Found { name: self.id.clone(), max_model_len: self.max_model_len, is_expected }
    }
}

/// A name that a server has told, as far as it is shown.
pub(crate) fn shown(name: &str) -> String {
    name.chars().take(TOLD_CHARS).collect()
}

/// Whether two names end alike, as those of one model in a folder and on the hub do.
fn have_one_last_part(one: &str, other: &str) -> bool {
    let last = |name: &str| {
        name.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_ascii_lowercase()
    };
    last(one) == last(other)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(ids: &[&str], told: Option<&str>) -> Result<Option<(String, bool)>, ModelError> {
        let data: Vec<_> = ids.iter().map(|id| json!({"id": id})).collect();
        let models: Models = serde_json::from_value(json!({ "data": data })).unwrap();
        let here = ["m", "Qwen/Qwen2.5-VL-7B-Instruct"].map(str::to_owned).to_vec();
        let found = models.find(&Names { told: told.map(str::to_owned), here })?;
        Ok(found.map(|found| (found.name, found.is_expected)))
    }

    #[test]
    fn the_model_of_this_name_is_meant() {
        let is = |name: &str, is_expected| Ok(Some((name.to_owned(), is_expected)));
        assert_eq!(found(&["other", "m"], None), is("m", true));
        assert_eq!(
            found(&["other", "Qwen/Qwen2.5-VL-7B-Instruct"], None),
            is("Qwen/Qwen2.5-VL-7B-Instruct", true)
        );
        assert_eq!(
            found(&["other", "/models/qwen2.5-vl-7b-instruct/"], None),
            is("/models/qwen2.5-vl-7b-instruct/", true)
        );
        assert_eq!(found(&["m", "other"], Some("other")), is("other", true));
        assert_eq!(found(&["other"], None), is("other", false), "it has but one");
        assert_eq!(found(&[], None), Ok(None));
    }

    #[test]
    fn a_server_without_the_model_is_refused() {
        let error = found(&["a", "b", "c", "d", "e", "f"], None).unwrap_err().to_string();
        assert!(
            error.contains("called m or Qwen/") && error.contains("a, b, c, d, e and others"),
            "{error}"
        );
        let error = found(&["m", &"long".repeat(100)], Some("n")).unwrap_err().to_string();
        assert!(
            error.contains("no model n ") && error.contains("but m, long") && error.len() < 200,
            "{error}"
        );
        assert!(found(&[], Some("n")).unwrap_err().to_string().contains("none at all"));
    }

    #[test]
    fn adapters_are_of_a_model_and_where_it_is_from_names_it() {
        let models = json!({"data": [
            {"id": "adapter", "parent": "theirs", "root": "/adapters/m"},
            {"id": "theirs", "root": "Qwen/Qwen2.5-VL-7B-Instruct", "max_model_len": 9},
            {"id": "other"},
        ]});
        let models: Models = serde_json::from_value(models).unwrap();
        let names = Names { told: None, here: vec!["Qwen/Qwen2.5-VL-7B-Instruct".to_owned()] };
        let expected =
            Found { name: "theirs".to_owned(), max_model_len: Some(9), is_expected: true };
        assert_eq!(models.find(&names), Ok(Some(expected)));
    }
}
