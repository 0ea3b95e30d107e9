//! The command line: a command, then flags that each have a value.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;
use std::str::FromStr;

/// Flags and their values.
pub struct Flags(BTreeMap<String, String>);

impl Flags {
    /// Returns the command and its flags. A flag at the end without a value is ignored.
    ///
    /// # Errors
    /// There is no command.
    pub fn parse_arguments() -> Result<(String, Self), Box<dyn Error>> {
        let mut arguments = std::env::args().skip(1);
        let command = arguments.next().ok_or(crate::USAGE)?;
        let flags = std::iter::from_fn(|| Some((arguments.next()?, arguments.next()?)));
        Ok((command, Self(flags.collect())))
    }

    /// Returns the value of a flag that may be missing.
    pub fn find(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Returns the value of a flag.
    ///
    /// # Errors
    /// The flag is missing.
    pub fn get(&self, name: &str) -> Result<&str, Box<dyn Error>> {
        self.find(name).ok_or_else(|| format!("{name} is missing").into())
    }

    /// Returns the value of a flag as a path.
    ///
    /// # Errors
    /// The flag is missing.
    pub fn path(&self, name: &str) -> Result<PathBuf, Box<dyn Error>> {
        self.get(name).map(PathBuf::from)
    }

    /// Parses the value of a flag.
    ///
    /// # Errors
    /// The flag is missing or its value is malformed.
    pub fn parse<T: FromStr<Err: Error + 'static>>(&self, name: &str) -> Result<T, Box<dyn Error>> {
        Ok(self.get(name)?.parse()?)
    }
}
