//! The modules of a package without tests: their items, imports and inline paths.
//!
//! The reader follows the module tree from `lib.rs` and `main.rs`. It does not read files that are
//! only included, such as generated code.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{
    Attribute, GenericArgument, ImplItem, Item, ItemMod, ItemUse, Macro, Meta, MetaList,
    PathArguments, PathSegment, Type, UseTree,
};

use super::StructureError;

/// A package of the workspace.
#[derive(Debug, Default)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) files: Vec<SourceFile>,
    pub(super) modules: Vec<Module>,
}

/// A source file with code outside tests.
#[derive(Debug)]
pub(super) struct SourceFile {
    /// The path below `src`.
    pub(super) path: String,
    /// The number of lines outside test items.
    pub(super) product_lines: usize,
    /// The numbers of the lines with a `Result<_, String>`.
    pub(super) string_errors: Vec<usize>,
}

/// A module in its own file or inline.
#[derive(Debug, Default)]
pub(super) struct Module {
    /// The module directly below the crate's root that contains this one; `None` for the root.
    pub(super) top_level: Option<String>,
    /// The index of its file.
    pub(super) file: usize,
    /// The index of its parent; `None` for the root.
    pub(super) parent: Option<usize>,
    pub(super) children: HashMap<String, usize>,
    pub(super) items: HashSet<String>,
    pub(super) imports: Vec<Import>,
    /// Paths in types, expressions, patterns and the arguments of macros.
    pub(super) inline_paths: HashSet<Vec<String>>,
}

/// A name that a `use` declaration brings into a module.
#[derive(Debug)]
pub(super) struct Import {
    pub(super) path: Vec<String>,
    /// The name in the importing module; `None` for a glob.
    pub(super) name: Option<String>,
    pub(super) is_reexport: bool,
}

/// A declared module whose file has not been read yet.
struct DeclaredModule {
    parent: Option<usize>,
    name: String,
    file: PathBuf,
    /// The folder of its child modules.
    folder: PathBuf,
}

impl Package {
    /// Reads the package with this name and `src` folder.
    pub(super) fn read(name: &str, src: &Path) -> Result<Self, StructureError> {
        let mut reader = Reader::default();
        reader.package.name = name.to_owned();
        for file in ["lib.rs", "main.rs"].map(|root| src.join(root)) {
            if file.is_file() {
                let folder = src.to_owned();
                let root = DeclaredModule { parent: None, name: String::new(), file, folder };
                reader.pending.push(root);
            }
        }
        while let Some(declared) = reader.pending.pop() {
            reader.read_file(declared, src)?;
        }
        Ok(reader.package)
    }

    /// Returns the number of lines outside tests.
    pub(super) fn product_lines(&self) -> usize {
        self.files.iter().map(|file| file.product_lines).sum()
    }
}

/// A visitor that collects the modules of a package, file by file.
#[derive(Default)]
struct Reader {
    package: Package,
    pending: Vec<DeclaredModule>,
    /// The index of the current module.
    module: usize,
    /// The folder of the current module's children.
    folder: PathBuf,
    /// The number of items that enclose the current one, without modules.
    depth: usize,
    /// The numbers of the lines of test items in the current file.
    test_lines: HashSet<usize>,
    /// The numbers of the lines with a `Result<_, String>` in the current file.
    string_errors: Vec<usize>,
}

impl Reader {
    fn read_file(&mut self, declared: DeclaredModule, src: &Path) -> Result<(), StructureError> {
        let DeclaredModule { parent, name, file: path, folder } = declared;
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(source) => return Err(StructureError::Read { path, source }),
        };
        let syntax = match syn::parse_file(&text) {
            Ok(syntax) => syntax,
            Err(source) => return Err(StructureError::Parse { path, source }),
        };
        self.module = self.add_module(parent, name, self.package.files.len());
        self.folder = folder;
        self.test_lines.clear();
        self.visit_file(&syntax);
        let path = path.strip_prefix(src).unwrap_or(&path).display().to_string();
        let product_lines = text.lines().count() - self.test_lines.len();
        let string_errors = std::mem::take(&mut self.string_errors);
        self.package.files.push(SourceFile { path, product_lines, string_errors });
        Ok(())
    }

    fn add_module(&mut self, parent: Option<usize>, name: String, file: usize) -> usize {
        let index = self.package.modules.len();
        let mut module = Module { parent, file, ..Module::default() };
        if let Some(parent) = parent.map(|parent| &mut self.package.modules[parent]) {
            module.top_level = parent.top_level.clone().or_else(|| Some(name.clone()));
            parent.children.insert(name, index);
        }
        self.package.modules.push(module);
        index
    }

    fn current(&mut self) -> &mut Module {
        &mut self.package.modules[self.module]
    }

    fn read_module(&mut self, declaration: &ItemMod) {
        let name = text(&declaration.ident);
        let folder = self.folder.join(&name);
        let Some((_, items)) = &declaration.content else {
            let beside = folder.with_extension("rs");
            let file = if beside.is_file() { beside } else { folder.join("mod.rs") };
            self.pending.push(DeclaredModule { parent: Some(self.module), name, file, folder });
            return;
        };
        let outer = self.module;
        let file = self.current().file;
        self.module = self.add_module(Some(outer), name, file);
        self.folder = folder;
        for item in items {
            self.visit_item(item);
        }
        self.folder.pop();
        self.module = outer;
    }

    /// Collects paths such as `a` and `a::b`. A name after a dot is a field or a method and is
    /// ignored.
    fn read_tokens(&mut self, tokens: TokenStream) {
        let mut path = Vec::new();
        let mut separator = String::new();
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if separator != "::" {
                        self.end_path(&mut path);
                    }
                    if separator != "." {
                        path.push(text(&ident));
                    }
                    separator.clear();
                    continue;
                }
                TokenTree::Punct(punct) => match punct.as_char() {
                    character @ (':' | '.') => separator.push(character),
                    _ => separator.clear(),
                },
                TokenTree::Group(group) => {
                    self.read_tokens(group.stream());
                    separator.clear();
                }
                TokenTree::Literal(_) => separator.clear(),
            }
            if separator != ":" && separator != "::" {
                self.end_path(&mut path);
            }
        }
        self.end_path(&mut path);
    }

    fn end_path(&mut self, path: &mut Vec<String>) {
        if !path.is_empty() {
            self.current().inline_paths.insert(std::mem::take(path));
        }
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        let head = head(item);
        if let [first, ..] = head.attrs
            && head.attrs.iter().any(is_test)
        {
            // Faster than `item.span()`, which prints the whole module.
            let last = match item {
                Item::Mod(ItemMod { content: Some((brace, _)), .. }) => brace.span.close(),
                _ => item.span(),
            };
            self.test_lines.extend(first.span().start().line..=last.end().line);
            return;
        }
        match item {
            Item::Mod(declaration) => self.read_module(declaration),
            Item::Use(declaration) => self.visit_item_use(declaration),
            _ => {
                if self.depth == 0 {
                    self.current().items.extend(head.name.map(text));
                }
                self.depth += 1;
                visit::visit_item(self, item);
                self.depth -= 1;
            }
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if let ImplItem::Fn(function) = item
            && function.attrs.iter().any(is_test)
        {
            let span = function.span();
            self.test_lines.extend(span.start().line..=span.end().line);
            return;
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_item_use(&mut self, declaration: &'ast ItemUse) {
        if declaration.leading_colon.is_none() {
            let is_reexport = !matches!(declaration.vis, syn::Visibility::Inherited);
            add_imports(&declaration.tree, &[], is_reexport, &mut self.current().imports);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names = path.segments.iter().map(|segment| text(&segment.ident)).collect();
            self.current().inline_paths.insert(names);
        }
        if let Some(segment) = path.segments.last().filter(|segment| has_string_error(segment)) {
            self.string_errors.push(segment.ident.span().start().line);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        visit::visit_macro(self, call);
        self.read_tokens(call.tokens.clone());
    }

    fn visit_meta_list(&mut self, list: &'ast MetaList) {
        // Attributes may contain paths: `#[error("one of {}", NAMES.join(", "))]`.
        self.read_tokens(list.tokens.clone());
    }

    // Skipped: the path of `pub(in …)` is a module.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}

/// Returns `true` for `Result<_, String>`.
fn has_string_error(segment: &PathSegment) -> bool {
    let PathArguments::AngleBracketed(arguments) = &segment.arguments else { return false };
    let Some(GenericArgument::Type(Type::Path(error))) = arguments.args.get(1) else {
        return false;
    };
    segment.ident == "Result" && error.path.is_ident("String")
}

/// Returns an identifier without `r#`.
fn text(ident: &Ident) -> String {
    ident.unraw().to_string()
}

/// The attributes and the name of an item.
struct Head<'a> {
    attrs: &'a [Attribute],
    name: Option<&'a Ident>,
}

fn head(item: &Item) -> Head<'_> {
    match item {
        Item::Const(syn::ItemConst { attrs, ident, .. })
        | Item::Enum(syn::ItemEnum { attrs, ident, .. })
        | Item::Fn(syn::ItemFn { attrs, sig: syn::Signature { ident, .. }, .. })
        | Item::Macro(syn::ItemMacro { attrs, ident: Some(ident), .. })
        | Item::Mod(ItemMod { attrs, ident, .. })
        | Item::Static(syn::ItemStatic { attrs, ident, .. })
        | Item::Struct(syn::ItemStruct { attrs, ident, .. })
        | Item::Trait(syn::ItemTrait { attrs, ident, .. })
        | Item::TraitAlias(syn::ItemTraitAlias { attrs, ident, .. })
        | Item::Type(syn::ItemType { attrs, ident, .. })
        | Item::Union(syn::ItemUnion { attrs, ident, .. }) => Head { attrs, name: Some(ident) },
        Item::ForeignMod(syn::ItemForeignMod { attrs, .. })
        | Item::Impl(syn::ItemImpl { attrs, .. })
        | Item::Macro(syn::ItemMacro { attrs, .. })
        | Item::Use(ItemUse { attrs, .. }) => Head { attrs, name: None },
        _ => Head { attrs: &[], name: None },
    }
}

/// Returns `true` for `#[test]`, `#[tokio::test]` and a `cfg` that names `test` outside a `not`.
fn is_test(attribute: &Attribute) -> bool {
    let path = attribute.path();
    match &attribute.meta {
        Meta::List(list) if path.is_ident("cfg") => names_test(list.tokens.clone()),
        _ => path.segments.last().is_some_and(|segment| segment.ident == "test"),
    }
}

/// Returns `true` if a `cfg` predicate names `test` outside a `not`.
fn names_test(predicate: TokenStream) -> bool {
    let mut is_negated = false;
    for token in predicate {
        match token {
            TokenTree::Group(group) if !is_negated && names_test(group.stream()) => return true,
            TokenTree::Ident(ident) if ident == "test" => return true,
            TokenTree::Ident(ident) => is_negated = ident == "not",
            _ => {}
        }
    }
    false
}

/// Adds the names that a `use` tree imports.
fn add_imports(tree: &UseTree, prefix: &[String], is_reexport: bool, imports: &mut Vec<Import>) {
    let extended = |name: &Ident| {
        let is_itself = name == "self" && !prefix.is_empty();
        prefix.iter().cloned().chain((!is_itself).then(|| text(name))).collect::<Vec<_>>()
    };
    match tree {
        UseTree::Path(path) => {
            let prefix = extended(&path.ident);
            add_imports(&path.tree, &prefix, is_reexport, imports);
        }
        UseTree::Group(group) => {
            for tree in &group.items {
                add_imports(tree, prefix, is_reexport, imports);
            }
        }
        UseTree::Name(name) => {
            let path = extended(&name.ident);
            imports.push(Import { name: path.last().cloned(), path, is_reexport });
        }
        UseTree::Rename(rename) => {
            let name = Some(text(&rename.rename));
            imports.push(Import { path: extended(&rename.ident), name, is_reexport });
        }
        _ => imports.push(Import { path: prefix.to_vec(), name: None, is_reexport }),
    }
}
