// Apply the chosen colour scheme before the page is drawn. Without a choice, the system's own scheme is used.
try {
  const theme = localStorage.getItem("corun-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // A browser that forbids storage gets the system's scheme.
}
document.documentElement.classList.add("has-js");
