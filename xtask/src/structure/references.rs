//! References between modules: the items of other modules that each module names. Re-exports are
//! resolved to the definition.

use std::collections::BTreeSet;

use super::source::{Import, Module, Package};

/// A reference from a module to an item that another module defines.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Reference {
    /// The index of the module that names the item.
    pub(super) from: usize,
    /// The index of the module that defines the item.
    pub(super) to: usize,
    /// The item's name; `*` for a glob import.
    pub(super) item: String,
}

pub(super) type References = BTreeSet<Reference>;

/// Returns the references between the modules of a package.
///
/// `mod` declarations, re-exports and references to ancestors are ignored, since a child is a part
/// of its parent. Dependencies only through fields and methods are not detected.
pub(super) fn references(package: &Package) -> References {
    let modules = &package.modules;
    let mut references = References::new();
    for (from, module) in modules.iter().enumerate() {
        let imports = module.imports.iter().filter(|import| !import.is_reexport);
        let imports = imports.map(|import| (&import.path, import.name.is_none()));
        for (path, is_glob) in imports.chain(module.inline_paths.iter().map(|path| (path, false))) {
            let mut resolver = Resolver { modules, in_progress: Vec::new() };
            let (to, item) = match resolver.resolve(from, path) {
                Some(Target::Item { module, name }) => (module, name),
                Some(Target::Module(module)) if is_glob => (module, "*"),
                _ => continue,
            };
            let mut ancestors = std::iter::successors(Some(from), |module| modules[*module].parent);
            if ancestors.all(|ancestor| ancestor != to) {
                references.insert(Reference { from, to, item: item.to_owned() });
            }
        }
    }
    references
}

/// The target of a path.
enum Target<'a> {
    Module(usize),
    Item { module: usize, name: &'a str },
}

struct Resolver<'a> {
    modules: &'a [Module],
    /// The names being looked up. Ends the resolution of circular imports.
    in_progress: Vec<(usize, &'a str)>,
}

impl<'a> Resolver<'a> {
    /// Returns the target of a path in `module`; `None` if it is outside the crate.
    fn resolve(&mut self, module: usize, path: &'a [String]) -> Option<Target<'a>> {
        let mut target = Target::Module(module);
        for (index, name) in path.iter().enumerate() {
            let Target::Module(module) = target else { break };
            target = match name.as_str() {
                "crate" => Target::Module(self.root(module)),
                "self" => target,
                "super" => Target::Module(self.modules[module].parent?),
                name => self.look_up(module, name, index + 1 == path.len())?,
            };
        }
        Some(target)
    }

    fn root(&self, module: usize) -> usize {
        self.modules[module].parent.map_or(module, |parent| self.root(parent))
    }

    /// Resolves `name` in a module. If an item and a module share the name, the last name of a path
    /// is the item.
    fn look_up(&mut self, index: usize, name: &'a str, is_last: bool) -> Option<Target<'a>> {
        if self.in_progress.contains(&(index, name)) {
            return None;
        }
        let module = &self.modules[index];
        let item = module.items.get(name).map(|name| Target::Item { module: index, name });
        let child = module.children.get(name).map(|child| Target::Module(*child));
        let own = if is_last { item.or(child) } else { child.or(item) };
        if own.is_some() {
            return own;
        }
        self.in_progress.push((index, name));
        let is_named = |import: &&Import| import.name.as_deref() == Some(name);
        let mut named = module.imports.iter().filter(is_named);
        let found = named.find_map(|import| self.resolve(index, &import.path));
        let found = found.or_else(|| {
            let mut globs = module.imports.iter().filter(|import| import.name.is_none());
            globs.find_map(|glob| match self.resolve(index, &glob.path)? {
                Target::Module(module) => self.look_up(module, name, is_last),
                Target::Item { .. } => None,
            })
        });
        self.in_progress.pop();
        found
    }
}
